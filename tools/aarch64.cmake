# SPDX-License-Identifier: Apache-2.0
# Toolchain file for Linux on aarch64, by Debian's cross compiler (apt install g++-12-aarch64-linux-gnu qemu-user-static):
#   cmake -S . -B build/arm -G Ninja -DCMAKE_TOOLCHAIN_FILE=tools/aarch64.cmake
# tools/arm builds with it, and runs what it built.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc-12)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++-12)
find_program(LOWBIT_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(LOWBIT_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${LOWBIT_QEMU} -cpu max -L /usr/aarch64-linux-gnu)
endif()
