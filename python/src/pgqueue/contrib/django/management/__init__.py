"""Where Django looks for the commands of an app."""
