"""The package inside other tools."""
