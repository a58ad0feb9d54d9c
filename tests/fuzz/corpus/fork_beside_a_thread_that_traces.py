# SPDX-License-Identifier: Apache-2.0
# A child forked while a thread parses a program hung on its mutex.
import torch
from tests.fuzz import check

torch.manual_seed(0)
check.forks_while_a_thread_traces(30)
