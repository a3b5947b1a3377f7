"""Memory profiles shipped with the package, one YAML file a class of machine."""
