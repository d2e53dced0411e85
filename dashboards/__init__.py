"""Pictures: one module a view; each turns the rows of one query into an Altair chart."""
