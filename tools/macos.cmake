# SPDX-License-Identifier: Apache-2.0
# Toolchain file for macOS on 64-bit Arm, by the clang, headers and stubs of libraries that PyPI's ziglang ships. Nothing runs
# what it builds here.
#   pip install ziglang==0.17.1
#   cmake -S . -B build/macos -G Ninja -DCMAKE_TOOLCHAIN_FILE=tools/macos.cmake
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_C_COMPILER ${CMAKE_CURRENT_LIST_DIR}/macos_compiler cc)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/macos_compiler c++)
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "")
