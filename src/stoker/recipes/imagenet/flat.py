"""Validation images that lie in one folder, as ImageNet hands them out: their classes stand in a file beside them."""

import csv
import io
import re

from stoker.data.locations import Location, is_file, list_folder, read
from stoker.errors import UserError
from stoker.recipes.imagenet.tars import ENDINGS

KAGGLE = "LOC_val_solution.csv"  # of the competition's download: image, then class and boxes
TINY = "val_annotations.txt"  # of Tiny ImageNet: image, class, box
SYNSETS = "imagenet_2012_validation_synset_labels.txt"  # a class a line, for the images in the order of their names
NUMBERS = "ILSVRC2012_validation_ground_truth.txt"
CLASS = re.compile(r"n\d{8}")


def flat_folder(folder: Location) -> Location | None:
    """Where the images of a validation folder lie that has no class folders; None: it has them, or no images at all."""
    content = list_folder(folder)
    folders = {name for name, one in content.items() if one.is_folder and not name.startswith((".", "__"))}
    if not folders and any(name.lower().endswith(ENDINGS) for name, one in content.items() if not one.is_folder):
        return folder
    return folder / "images" if is_file(folder / TINY) and folders == {"images"} else None


def flat_labels(root: Location, folder: Location, names: list[str]) -> dict[str, str]:
    """The class of each of the images `names` of a folder, from the first list of classes that is found."""
    places = dict.fromkeys([folder, folder.parent, root])
    for place in places:
        if is_file(place / KAGGLE):
            return _checked(_from_kaggle(place / KAGGLE), names, place / KAGGLE)
        if is_file(place / TINY):
            return _checked(_from_lines(place / TINY), names, place / TINY)
        if is_file(place / SYNSETS):
            return _checked(_in_order(place / SYNSETS, names), names, place / SYNSETS)
    numbers = next((place / NUMBERS for place in places if is_file(place / NUMBERS)), None)
    found = f"{numbers} numbers classes in the order of the challenge, which no name tells. " if numbers else ""
    raise UserError(
        f"{folder} holds {len(names):,} images and no folders of classes. {found}Put one of these beside it: {KAGGLE} "
        f"(of Kaggle's download), {TINY} (Tiny ImageNet), {SYNSETS} (a class such as n01440764 a line, for the images in "
        f"the order of their names); or move the images into val/CLASS/."
    )


def _from_kaggle(path: Location) -> dict[str, str]:
    try:
        rows = list(csv.reader(io.StringIO(_text(path))))
    except csv.Error as error:
        raise UserError(f"{path} is no table of commas: {error}") from error
    return {row[0]: row[1].split()[0] for row in rows if len(row) > 1 and CLASS.match(row[1])}


def _from_lines(path: Location) -> dict[str, str]:
    rows = (line.split("\t") for line in _text(path).splitlines())
    return {_stem(row[0]): row[1] for row in rows if len(row) > 1}


def _in_order(path: Location, names: list[str]) -> dict[str, str]:
    classes = _text(path).split()
    if len(classes) != len(names):
        raise UserError(f"{path} has {len(classes):,} classes, and there are {len(names):,} images beside it.")
    return {_stem(name): one for name, one in zip(sorted(names), classes, strict=True)}


def _checked(classes: dict[str, str], names: list[str], path: Location) -> dict[str, str]:
    unknown = [name for name in names if _stem(name) not in classes]
    if unknown:
        raise UserError(f"{path} does not say the class of {len(unknown):,} images, such as {unknown[0]}.")
    return {name: classes[_stem(name)] for name in names}


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _text(path: Location) -> str:
    try:
        return read(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
