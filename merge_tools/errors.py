"""The error that merging raises for what a user gave: the recipe, a source, the output path."""

from run_tools.errors import UserError

MergeError = UserError
