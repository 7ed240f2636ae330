#pragma once

#include <string>

#include <tessera/plan/machine_speed.h>

// The name and speeds of a GPU. The data sheet states them as upper bounds. Speeds are those without sparsity.
struct GpuCard {
  const char* name;
  double bf16_flop_per_s, fp32_flop_per_s;  // bf16: speed of tensor cores; of fp16 on cards without bf16
  double memory_bytes_per_s;
  double memory_bytes;
  double link_bytes_per_s;  // to the other GPUs of a host, in one direction

  tessera::MachineSpeed speed() const;
};

// Returns the GPU with this name. Throws std::invalid_argument, which lists the known names.
const GpuCard& gpu_card(const std::string& name);
// Returns the known names as "a100, h100, ...".
std::string gpu_card_names();
