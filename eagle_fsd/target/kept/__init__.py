"""What stands for a model whose graphs are kept, from the second start on."""
