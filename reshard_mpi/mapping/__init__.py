"""Map one model's tensors to another's, by equations that are read in either direction.

`syntax` reads an equation, `blocks` sees that it is one-to-one, `parsing` reads a file of them as `rules`. `candidates`
finds the tensors that may be those of an equation, `directions` which way a map is read, `matching` where an equation
applies in a checkpoint, `sizes` what its axes are there, `pairs` which boxes of one side are which boxes of the other,
`following` what becomes of the optimizer's state, `dropping` what is left out, `fills` what is made up, and `mapped`
what all of that makes of a checkpoint (`made`). `numbering` tells whose state it is where torch has numbers,
`settings` and `computing` what becomes of step counts and the like, and `naming` applies a map to a file that has all
this. Nothing here touches a tensor's bytes.
"""
