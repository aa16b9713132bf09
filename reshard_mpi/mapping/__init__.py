"""Maps between the tensors of two models: equations of shapes that are read in either direction.

`syntax` reads an equation, `blocks` sees that it is one-to-one, `rules` reads a file of them. `matching` finds where
an equation applies in a checkpoint, `sizes` what its axes are there, `pairs` which boxes of one side are which of the
other, and `mapped` what all of that makes of a checkpoint. Nothing here touches a tensor's bytes.
"""
