# SPDX-License-Identifier: Apache-2.0
# A child that is forked while another thread makes what is made once.
from tests.fuzz import check

check.forks_during_the_first_call(60)
