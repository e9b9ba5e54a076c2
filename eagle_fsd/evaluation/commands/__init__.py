"""The commands of `eagle-fsd eval`: each module has `main(argv)`."""
