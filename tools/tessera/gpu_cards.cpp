#include "gpu_cards.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <stdexcept>

using namespace tessera;

namespace {

// Sources, all by NVIDIA: "V100 Tensor Core GPU" (2020; SXM2, fp16), "A100 80GB" and "A100 40GB Tensor Core GPU" (2021;
// SXM4), "A10 Tensor Core GPU" (2021), "Ada GPU Architecture" (2022; RTX 4090), "H100 Tensor Core GPU" (2023; SXM5, and
// PCIe for h100-pcie), "L4" and "L40S Tensor Core GPU" (2023), "H200 Tensor Core GPU" (2023; SXM), "DGX B200" (2024; an
// eighth of the system). Speeds that are stated with sparsity are halved. NVLink's speed is stated for both directions
// together, and is also halved. Cards without NVLink have PCIe Gen4 x16, or Gen5 for h100-pcie.
constexpr double kGen4 = 32e9, kGen5 = 64e9;
constexpr std::array<GpuCard, 12> kCards = {{
    {"a10", 125e12, 31.2e12, 600e9, 24e9, kGen4},
    {"a100", 312e12, 19.5e12, 2039e9, 80e9, 300e9},
    {"a100-40gb", 312e12, 19.5e12, 1555e9, 40e9, 300e9},
    {"b200", 2250e12, 75e12, 8e12, 180e9, 900e9},
    {"h100", 989e12, 67e12, 3.35e12, 80e9, 450e9},
    {"h100-pcie", 756e12, 51e12, 2e12, 80e9, kGen5},
    {"h200", 989e12, 67e12, 4.8e12, 141e9, 450e9},
    {"l4", 121e12, 30.3e12, 300e9, 24e9, kGen4},
    {"l40s", 362e12, 91.6e12, 864e9, 48e9, kGen4},
    {"rtx4090", 165e12, 82.6e12, 1008e9, 24e9, kGen4},
    {"v100", 125e12, 15.7e12, 900e9, 32e9, 150e9},
    {"v100-16gb", 125e12, 15.7e12, 900e9, 16e9, 150e9},
}};

}  // namespace

MachineSpeed GpuCard::speed() const {
  MachineSpeed speed;
  speed.work[static_cast<size_t>(WorkClass::kMatmul)] = SpeedCurve::of_speed(fp32_flop_per_s);
  speed.work_16bit[static_cast<size_t>(WorkClass::kMatmul)] = SpeedCurve::of_speed(bf16_flop_per_s);
  speed.work[static_cast<size_t>(WorkClass::kMemory)] = SpeedCurve::of_speed(memory_bytes_per_s);
  speed.within_host.bytes_per_s = link_bytes_per_s;
  return speed;
}

const GpuCard& gpu_card(const std::string& name) {
  std::string lower = name;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* const found = std::ranges::find_if(kCards, [&](const GpuCard& card) { return lower == card.name; });
  if (found == kCards.end())
    throw std::invalid_argument("--gpu " + name + ": expected one of " + gpu_card_names() +
                                "; for another, give --memory, --flops, --memory-bandwidth and --link");
  return *found;
}

std::string gpu_card_names() {
  std::string names;
  for (const GpuCard& card : kCards) names += (names.empty() ? "" : ", ") + std::string(card.name);
  return names;
}
