"""What is made out of a comparison, the content of a compare.json: page, pictures, csv file, table, verdict."""
