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

# Programs with options. train_gpt starts train_gpt_plan for its option --plan.
find_package(Boost QUIET COMPONENTS program_options)
if(Boost_FOUND)
  file(GLOB _common CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/common/*.cpp")
  foreach(_name stages zero_recipe finetune)
    add_executable(example_${_name} ${_name}/main.cpp ${_common})
    target_include_directories(example_${_name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/..")
    target_link_libraries(example_${_name} PRIVATE tessera::tessera Boost::program_options)
    set_target_properties(example_${_name} PROPERTIES OUTPUT_NAME ${_name})
  endforeach()
  find_package(nlohmann_json 3.9 REQUIRED)
  file(GLOB _train_gpt CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/train_gpt/*.cpp")
  list(FILTER _train_gpt EXCLUDE REGEX "main.cpp$|/plan.cpp$")
  file(CONFIGURE OUTPUT default_data.cpp @ONLY CONTENT [=[
namespace train_gpt {
extern const char* const kDefaultData;
const char* const kDefaultData = "@CMAKE_CURRENT_SOURCE_DIR@/data/king_james_new_testament.txt";
}
]=])
  foreach(_name train_gpt train_gpt_plan)
    add_executable(example_${_name} ${_train_gpt} ${_common} "${CMAKE_CURRENT_BINARY_DIR}/default_data.cpp")
    target_include_directories(example_${_name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/.." train_gpt)
    target_link_libraries(example_${_name} PRIVATE tessera::tessera Boost::program_options nlohmann_json::nlohmann_json)
    set_target_properties(example_${_name} PROPERTIES OUTPUT_NAME ${_name})
  endforeach()
  target_sources(example_train_gpt PRIVATE train_gpt/main.cpp)
  target_sources(example_train_gpt_plan PRIVATE train_gpt/plan.cpp train_gpt/plan_main.cpp)
endif()
