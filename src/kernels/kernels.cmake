# Arithmetic on arrays: the same source for each instruction set, chosen at run time (dispatch.cc).
set(kernels_dir ${CMAKE_CURRENT_LIST_DIR})
set(kernels_sources ${kernels_dir}/dispatch.cc ${kernels_dir}/baseline.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  list(APPEND kernels_sources ${kernels_dir}/avx2.cc ${kernels_dir}/avx512.cc)
  set_source_files_properties(${kernels_dir}/avx2.cc PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
  set_source_files_properties(${kernels_dir}/avx512.cc PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq")
endif()

add_library(horovod_kernels STATIC ${kernels_sources})
target_include_directories(horovod_kernels PUBLIC ${kernels_dir}/..)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The loop that copies must not become a call of the memcpy that it is there to avoid.
  target_compile_options(horovod_kernels PRIVATE -fno-tree-loop-distribute-patterns)
endif()
if(NOT HOROVOD_SANITIZE)
  target_compile_options(horovod_kernels PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3>)
endif()
