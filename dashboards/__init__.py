"""Pictures, one file a view: rows of one query in, an Altair chart and one sentence out.

A view is a module that does not begin with `_`:

- its docstring's first line is `title: question`;
- `QUERY` names the view, macro or finding whose rows it draws; the frame passes those of one deployment;
- `ORDER` is its place among the questions;
- `chart(rows)` draws them, without maths, also when there are none; None where words say it better;
- `sentence(rows)` says what they show for this run, in words that do not begin with an id; None when there
  are no data: the view is then absent.

Optional: `LEVEL`, the evidence level where the rows have no column `level`; `PARAMETERS`, what the query is asked with.
"""
