// SPDX-License-Identifier: Apache-2.0
// The CPU time that the control groups of this process allow it, which docker's --cpus and Kubernetes' limits set. More
// threads than that only use it up sooner: then all of them wait for the next period.
#pragma once

#include "core/error.hpp"

namespace lowbit {

// CPUs, such as 0.5; infinity without a quota. Read once, from cgroup v1 or v2.
LOWBIT_API double cpu_quota();

}  // namespace lowbit
