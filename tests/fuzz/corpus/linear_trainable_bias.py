# SPDX-License-Identifier: Apache-2.0
# A trainable bias with 16-bit activations: the product was rounded before the bias was added; a strided bias was refused.
import torch
from tests.fuzz import check

torch.manual_seed(0)
x = torch.randn(5, 64).to(torch.bfloat16)
bias = (torch.randn(17) * 3).requires_grad_()
check.linear(x, 17, "int8", group_size=0, mapping="symmetric", x_format="float", bias=bias)
strided = torch.randn(34)[::2].requires_grad_()
check.linear(x, 17, "int8", group_size=0, mapping="symmetric", x_format="float", bias=strided, x_gradient=True)
