"""Classes are small: a part of a class that has a name and a law of its own is a class."""

import counts


def test_no_class_has_more_than_12_attributes():
    assert counts.large_classes() == {}


def test_attributes_of_base_classes_count_too():
    found = counts.attributes()
    assert found["CotangentLevel"] > found["VmapLevel"] > found["Level"] > 0
