# Builds and runs a project that uses qkv, as a user would:
#   cmake -DKIND=find_package|add_subdirectory|pkg_config -DQKV_SOURCE=... -DQKV_BUILD=... -DCXX=... -DLAUNCHER=... -DGENERATOR=... -DBUILD_TYPE=... -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\n${text}")
  endif()
  set(text "${text}" PARENT_SCOPE)
endfunction()

set(work ${QKV_BUILD}/consume/${KIND})
file(REMOVE_RECURSE ${work}/prefix)
file(MAKE_DIRECTORY ${work})
if(NOT KIND STREQUAL "add_subdirectory")
  run(${CMAKE_COMMAND} --install ${QKV_BUILD} --prefix ${work}/prefix)
endif()

if(KIND STREQUAL "pkg_config")
  file(GLOB_RECURSE pc ${work}/prefix/*/qkv.pc)
  get_filename_component(folder ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  run(pkg-config --define-variable=prefix=${work}/prefix --static --cflags --libs qkv)
  separate_arguments(flags UNIX_COMMAND "${text}")
  run(${CXX} -std=c++20 ${QKV_SOURCE}/examples/first.cpp -o ${work}/first ${flags})
else()
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${QKV_SOURCE}/tests/consume/${KIND} -B ${work}/build -DQKV_SOURCE=${QKV_SOURCE}
      -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
      -DCMAKE_BUILD_TYPE=${BUILD_TYPE})
  run(${CMAKE_COMMAND} --build ${work}/build)
  file(CREATE_LINK ${work}/build/first ${work}/first SYMBOLIC)
endif()

run(${work}/first)
if(NOT text STREQUAL "query 0: 1\nquery 1: 1.5\nquery 2: 2\nquery 3: 2.5\n")
  message(FATAL_ERROR "the program prints:\n${text}")
endif()
