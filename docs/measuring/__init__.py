"""What the measuring scripts in this folder's parent share. Not part of the package."""
