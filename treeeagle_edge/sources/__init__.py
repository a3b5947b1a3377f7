"""Where models and heads come from: names to files, the demo model, and what a fetch would bring."""
