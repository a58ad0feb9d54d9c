# SPDX-License-Identifier: Apache-2.0
# find_package(lowbit CONFIG): the target lowbit::lowbit is liblowbit.so with the folder of lowbit/lowbit.h.
get_filename_component(lowbit_folder "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT EXISTS "${lowbit_folder}/liblowbit.so")
  set(lowbit_FOUND FALSE)
  set(lowbit_NOT_FOUND_MESSAGE "${lowbit_folder} has no liblowbit.so")
elseif(NOT TARGET lowbit::lowbit)
  add_library(lowbit::lowbit SHARED IMPORTED)
  set_target_properties(lowbit::lowbit PROPERTIES IMPORTED_LOCATION "${lowbit_folder}/liblowbit.so"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${lowbit_folder}/include")
endif()
unset(lowbit_folder)
