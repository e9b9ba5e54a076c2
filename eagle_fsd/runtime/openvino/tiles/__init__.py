"""Products with weights of few bits, by an operator of our own: its code, its compiler and its layout."""
