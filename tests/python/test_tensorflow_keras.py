"""Keras with Horovod: the cases of keras_cases.py, with Keras 3 and with Keras 2 (tf-keras), which has more of them."""

import importlib.util

import pytest
from cases import Cases, Outcomes
from keras2_cases import keras2_cases
from keras_cases import cases, start
from tensorflow_arrays import ENVIRONMENT, LIMIT

of_keras2 = Cases()
of_keras2.include(cases)
of_keras2.include(keras2_cases)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start, LIMIT, ENVIRONMENT)


@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


@pytest.fixture(scope="module")
def outcomes_of_keras2() -> Outcomes:
    return of_keras2.run(2, start, LIMIT, {**ENVIRONMENT, "TF_USE_LEGACY_KERAS": "1"})


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs the Python package tf-keras")
@pytest.mark.parametrize("case", of_keras2.names())
def test_keras_2(outcomes_of_keras2: Outcomes, case: str) -> None:
    outcomes_of_keras2.check(case)
