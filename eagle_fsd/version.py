"""The package's version, for everything below the package itself."""

__version__ = "0.2.0"
