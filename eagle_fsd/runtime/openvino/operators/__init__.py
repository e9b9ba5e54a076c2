"""Operators of our own for OpenVINO: their code in C++, its compiler, and what makes nodes of them."""
