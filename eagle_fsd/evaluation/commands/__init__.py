"""The commands of `eagle-fsd eval`: each module has `build_parser()` and `main(argv)`."""
