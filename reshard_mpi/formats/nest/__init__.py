"""Keep nested dictionaries as names joined by dots, and one text to make the nest again.

Tensors of `{"model": {"w": tensor}, "epoch": 3}` get the name `model.w`. All else is kept as JSON in one string of the
shard, called `NEST`, so that it passes through formats that have names only:

    value  null, true, false, numbers, texts and arrays are themselves (an array is a list), and
           {"dict": [entry ...]}           a dictionary, in the order of its keys
           {"tuple": [value ...]}
           {"tensor": null}                in an array or tuple: the tensor of this place
           {"bytes": BASE64}               {"float": HEX}: infinite or no number, the bytes of the double, big-endian
           {"global": [MODULE, NAME]}      a constant, such as an element type of torch
           {"call": [MODULE, NAME, [value ...]], "new": true, "state": value, "items": [value ...], "dict": [entry ...]}
                                           an object of another class; all but "call" may be left out
    entry  [key, value], or [key]          which is a tensor; keys are values that are no array, mostly texts

Only objects of `nodes.PLAIN` are kept. A tensor that no entry lists belongs to the dictionary with the longest path
that its name begins with, of those that are no state and all of whose listed keys are texts; the rest of its name is
its key, and it comes after what is listed. So names of tensors are listed only where that would be wrong.

The order of tensors that are not listed stands beside the value, for formats and stages of a pipeline have orders of
their own, and torch numbers the state of parameters by their order in the model:

    {"nest": value, "order": [COUNT, TEXT ...]}     names of all tensors; each is the first COUNT characters of the one
                                                    before it, and TEXT

A text without it, as earlier versions wrote all, is the value alone; tensors have the order of the shard then. A shard
of names alone, a plain dictionary of tensors followed by texts, has no such string.
"""
