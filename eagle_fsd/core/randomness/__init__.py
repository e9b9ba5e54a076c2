"""Where random numbers come from: a stream for each text, and the noise that draws its tokens."""
