"""What is made out of a comparison, the content of a compare.json.

`page.write_page`, `pictures.write_pictures`, `files.write_csv`, `files.terminal_table`; `merge.read` and `merge.merge`
for several runs. What is recommended: `toolkit.launch.verdict.recommend`.
"""
