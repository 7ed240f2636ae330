#pragma once

#include <string>

#include <tessera/plan/machine_speed.h>

// Speeds of a GPU by name, as its data sheet states them: upper bounds, dense, without sparsity.
struct GpuCard {
  const char* name;
  double bf16_flop_per_s, fp32_flop_per_s;  // bf16: of tensor cores, fp16 on cards without bf16
  double memory_bytes_per_s;
  double memory_bytes;
  double link_bytes_per_s;  // to the other GPUs of a host, in one direction

  tessera::MachineSpeed speed() const;
};

// Throws std::invalid_argument that lists the known names.
const GpuCard& gpu_card(const std::string& name);
// "a100, h100, ..."
std::string gpu_card_names();
