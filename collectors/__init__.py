"""Collectors: one module a format family; each turns what a system wrote into the rows of tables.sql."""
