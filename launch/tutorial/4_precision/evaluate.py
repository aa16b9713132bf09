"""Evaluates weights of the network in the type that they are saved in: python evaluate.py FILE...

The first file has the weights that the others were made from. Each of these must hold, bit by bit, what torch itself
makes of them in its type, and recognize nearly as many digits.
"""

import sys

import torch
from network import NeuralNetwork, accuracy, test_data

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MOST_LOST = 0.01


def main(files: list[str]) -> None:
    pictures, shown = test_data()
    masters = torch.load(files[0], weights_only=True)["model"]
    of_masters = None
    for file in files:
        weights = torch.load(file, weights_only=True)["model"]
        dtype = next(iter(weights.values())).dtype
        for name, master in masters.items():
            if weights[name].dtype != dtype or not torch.equal(weights[name], master.to(dtype)):
                sys.exit(f"{file}: {name} is not what torch makes of it in {dtype}")
        model = NeuralNetwork().to(dtype)
        model.load_state_dict(weights)
        recognized = accuracy(model, pictures, shown)
        of_masters = recognized if of_masters is None else of_masters
        if recognized < of_masters - MOST_LOST:
            sys.exit(f"{file}: only {recognized:.1%} recognized, {of_masters:.1%} with the weights it was made from")
        with torch.no_grad():
            predicted = model(pictures[:1].to(dtype)).argmax().item()
        print(f"{dtype}: {recognized:.1%} recognized; predicted {WORDS[predicted]}, is {WORDS[shown[0]]}; {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
