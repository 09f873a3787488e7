"""The measured systems, one file each, used through their public API or SQL."""
