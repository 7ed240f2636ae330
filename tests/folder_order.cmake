# Fails if a library's file includes a header of a library that its own does not link, directly or indirectly. Also
# fails if a library links a later one.
#
#   cmake -DSOURCE_DIR=<tree> -DLINKS=<library>=<linked library>,...[/<library>=...] -P folder_order.cmake
cmake_minimum_required(VERSION 3.25)

# A file belongs to the library with the longest matching prefix of its path.
set(library_of
  core/runtime=base core/memory=base core/trace=base core/comm=comm core/launch=comm core/paging=paging core/layout=flat
  core/gradients=flat core/model=flat offload=offload optim=optim checkpoint=checkpoint elastic=elastic oss=oss fsdp=fsdp sdp=sdp
  exported=exported plan=plan)
foreach(public
    base=autocast,detail/operation_handle,detail/copy_traffic,errors,event_writer,memory_cache,peak_memory,plan/memory_kind,scope_exit
    comm=communicator,host_results,launch,mpi,wait_report
    flat=deferred,distributed_sampler,model/,detail/gradient_source,checkpoint/stateful,options/wire_format
    flat=visit_tensors,wrap,plan/planned_memory,detail/optimizer_shards
    offload=activation_offload,checkpointed.,options/offload_options,options/cpu_offload
    optim=optim/,detail/listed,detail/parameter_parts,detail/linear_weights,quantize_linears
    checkpoint=checkpoint.,checkpoint/
    elastic=elastic
    oss=oss,sharded_optimizer
    fsdp=fsdp,model/fully_sharded_module,options/fsdp,detail/converted_inputs
    sdp=sdp,ddp,sync_batch_norm,detail/replicated_module
    zero=zero exported=exported plan=plan zero=tessera.)
  string(REGEX MATCH "^([a-z]+)=(.*)$" _ "${public}")
  string(REPLACE "," ";" names "${CMAKE_MATCH_2}")
  list(TRANSFORM names PREPEND "include/tessera/")
  list(TRANSFORM names APPEND "=${CMAKE_MATCH_1}")
  list(APPEND library_of ${names})
endforeach()
# Headers that any library may include: plain values without an implementation.
list(APPEND library_of include/tessera/model/range=base)

function(find_library_of path result)
  set(longest 0)
  set(found)
  foreach(entry ${library_of})
    string(REPLACE "=" ";" entry "${entry}")
    list(GET entry 0 begin)
    string(LENGTH "${begin}" length)
    string(FIND "${path}" "${begin}" at)
    if(at EQUAL 0 AND length GREATER longest)
      set(longest ${length})
      list(GET entry 1 found)
    endif()
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

set(wrong)
set(count 0)
string(REPLACE "/" ";" links "${LINKS}")
foreach(entry ${links})
  string(REGEX MATCH "^([a-z]+)=(.*)$" _ "${entry}")
  set(library ${CMAKE_MATCH_1})
  string(REPLACE "," ";" linked "${CMAKE_MATCH_2}")
  set(knows_${library} ${library})
  foreach(other ${linked})
    if(NOT DEFINED knows_${other})
      list(APPEND wrong "${library} links ${other}, which does not come before it")
    endif()
    list(APPEND knows_${library} ${knows_${other}})
  endforeach()
endforeach()

file(GLOB_RECURSE files RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/core/*" "${SOURCE_DIR}/offload/*" "${SOURCE_DIR}/optim/*"
  "${SOURCE_DIR}/checkpoint/*" "${SOURCE_DIR}/elastic/*" "${SOURCE_DIR}/oss/*" "${SOURCE_DIR}/fsdp/*" "${SOURCE_DIR}/sdp/*"
  "${SOURCE_DIR}/exported/*" "${SOURCE_DIR}/plan/*" "${SOURCE_DIR}/include/*")
list(FILTER files INCLUDE REGEX "[.](h|cpp)$")
foreach(file ${files})
  find_library_of("${file}" library)
  if(NOT library)
    list(APPEND wrong "${file} belongs to no library")
    continue()
  endif()
  file(STRINGS "${SOURCE_DIR}/${file}" includes REGEX "^ *# *include +(\"|<tessera/)")
  foreach(include ${includes})
    string(REGEX MATCH "[\"<]([^\">]+)" _ "${include}")
    set(path "${CMAKE_MATCH_1}")
    if(include MATCHES "<")
      set(path "include/${path}")
    endif()
    math(EXPR count "${count} + 1")
    find_library_of("${path}" included)
    if(NOT EXISTS "${SOURCE_DIR}/${path}")
      list(APPEND wrong "${file} includes what is not there: ${path}")
    elseif(NOT included IN_LIST knows_${library})
      list(APPEND wrong "${file} includes ${path} of ${included}")
    endif()
  endforeach()
endforeach()
list(JOIN wrong "\n  " wrong)
if(wrong OR count LESS 100)
  message(FATAL_ERROR "of ${count} includes, these go against the order of the libraries:\n  ${wrong}")
endif()
message("${count} includes, none against the order of the libraries")
