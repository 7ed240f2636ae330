// What the values of options are called on the command line.
#include "options.h"

namespace train_gpt {

const char* name_of(Wrapper wrapper) {
  switch (wrapper) {
    case Wrapper::kLocal:
      return "local";
    case Wrapper::kDdp:
      return "ddp";
    case Wrapper::kOss:
      return "oss";
    case Wrapper::kSdp:
      return "sdp";
    case Wrapper::kFsdp:
      return "fsdp";
  }
  return "?";
}

const char* name_of(OptimizerKind optimizer) {
  switch (optimizer) {
    case OptimizerKind::kAdamW:
      return "adamw";
    case OptimizerKind::kAdamW8bit:
      return "adamw8bit";
    case OptimizerKind::kMuon:
      return "muon";
    case OptimizerKind::kLion:
      return "lion";
    case OptimizerKind::kAdafactor:
      return "adafactor";
    case OptimizerKind::kScheduleFree:
      return "schedulefree";
    case OptimizerKind::kLamb:
      return "lamb";
    case OptimizerKind::kSgd:
      return "sgd";
  }
  return "?";
}

const char* name_of(Offload offload) {
  switch (offload) {
    case Offload::kNone:
      return "none";
    case Offload::kCpu:
      return "cpu";
    case Offload::kDisk:
      return "disk";
  }
  return "?";
}

const char* name_of(BaseFormat format) {
  switch (format) {
    case BaseFormat::kFull:
      return "none";
    case BaseFormat::kNf4:
      return "nf4";
    case BaseFormat::kInt8:
      return "int8";
  }
  return "?";
}

}  // namespace train_gpt
