"""Map one model's tensors to another's, by equations that are read in either direction.

`equations` reads an equation, `box_pairs` pairs the boxes of its sides, one to one, and `map_file` reads the files of a
map as `rules`. To apply it, `direction` tells which way it is read, `matching` where an
equation applies, `axis_sizes` how long its axes are there, `tensor_kinds` which parameter state belongs to,
`follow_parameters` how it follows that, and what becomes of parameters in optimizers, `stranded_state` whether any
stays behind, `selection` which results are asked for; `apply_rules` does all of this for one map (its results are in
`result`), and `chain` for several. `apply_to_file` applies maps to a file: `numbered_state` gives torch's numbers
names, `optimizers` reads optimizers of all forms into one record, `dictionaries` moves parts of a nest, and
`rename_values` and `carry_values` carry settings along. Nothing here touches a tensor's bytes.
"""
