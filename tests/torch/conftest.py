"""One thread, as on a worker: the number of threads changes bits. What a test sets for the process ends with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpstage.torch.environment import pin
from hpstage.training.code import patches

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
pin()
assert torch.get_num_threads() == 1


# A process of tests has imported far more than one that trains, and each search looks through all of it for patches:
# most of the time of thousands of tests. None of them patches these.
OTHERS = """
    IPython PIL _pytest accelerate aiohttp babel bokeh boto3 botocore dask datasets distributed docutils fsspec
    google h2 httpx huggingface_hub hypothesis jinja2 joblib jupyter_client matplotlib mpl_toolkits mpmath msgpack
    nbformat networkx onnx opentelemetry pandas peft pip pkg_resources psutil pydantic pygments pyparsing pytest
    pytz redis requests rich s3fs safetensors scipy setuptools sklearn sphinx sqlalchemy sympy tensorboard
    tokenizers toolz torchmetrics tornado trl urllib3 yaml zict
"""
patches._WITHOUT_TRAINING |= {*OTHERS.split()}


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    dtype, errors = torch.get_default_dtype(), np.geterr()
    yield
    torch.set_default_dtype(dtype)
    np.seterr(**errors)
