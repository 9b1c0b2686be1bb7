"""What is made out of a comparison (compare.json): a page, pictures, a table, a csv file."""
