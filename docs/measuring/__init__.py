"""What the scripts in docs/ share. Not a part of the package."""
