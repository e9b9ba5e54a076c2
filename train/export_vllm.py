"""The script of `eagle-fsd train export-vllm`, for a checkout: see --help."""

from eagle_fsd.training.commands.export_vllm import main

if __name__ == "__main__":
    main()
