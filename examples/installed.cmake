# The CMakeLists.txt of the installed examples, which builds them with the installed package:
#
#   cmake -S . -B /tmp/examples -DCMAKE_PREFIX_PATH=<where Tessera is installed>
#   cmake --build /tmp/examples
cmake_minimum_required(VERSION 3.25)
project(tessera_examples LANGUAGES CXX)

find_package(tessera REQUIRED)
file(GLOB _examples CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cpp")
foreach(_example ${_examples})
  get_filename_component(_name "${_example}" NAME_WE)
  add_executable(example_${_name} "${_example}")
  target_link_libraries(example_${_name} PRIVATE tessera::tessera)
  set_target_properties(example_${_name} PROPERTIES OUTPUT_NAME ${_name})
endforeach()

# Programs with options. train_gpt uses internal headers, and needs the source tree.
find_package(Boost QUIET COMPONENTS program_options)
if(Boost_FOUND)
  file(GLOB _common CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/common/*.cpp")
  foreach(_name stages zero_recipe finetune)
    add_executable(example_${_name} ${_name}/main.cpp ${_common})
    target_include_directories(example_${_name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/..")
    target_link_libraries(example_${_name} PRIVATE tessera::tessera Boost::program_options)
    set_target_properties(example_${_name} PROPERTIES OUTPUT_NAME ${_name})
  endforeach()
endif()
