// Archives that are damaged, hostile or of another version.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/exported/expected.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

#include <tessera/exported.h>
#include "core/runtime/crc32.h"
#include "exported/archive/archive.h"
#include "exported/graph/expression.h"
#include "exported/graph/operators.h"
#include "exported/graph/steps.h"

namespace tessera::exported_test {
using namespace internal;
namespace {

using namespace testing_support;
using nlohmann::json;

void put(std::string& out, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(number >> (8 * i));
}

// A zip archive of stored members.
std::string zip_of(const std::map<std::string, std::string>& members) {
  std::string zip, directory;
  for (const auto& [name, data] : members) {
    std::string common;
    put(common, 20, 2), put(common, 0, 2), put(common, 0, 2), put(common, 0, 4), put(common, 0, 4);
    put(common, data.size(), 4), put(common, data.size(), 4), put(common, name.size(), 2), put(common, 0, 2);
    put(directory, 0x02014b50, 4), put(directory, 20, 2);
    directory += common;
    put(directory, 0, 2), put(directory, 0, 2), put(directory, 0, 2), put(directory, 0, 4),
        put(directory, zip.size(), 4);
    directory += name;
    put(zip, 0x04034b50, 4);
    zip += common + name + data;
  }
  const size_t begin = zip.size();
  zip += directory;
  put(zip, 0x06054b50, 4), put(zip, 0, 2), put(zip, 0, 2), put(zip, members.size(), 2), put(zip, members.size(), 2);
  put(zip, directory.size(), 4), put(zip, begin, 4), put(zip, 0, 2);
  return zip;
}

std::map<std::string, ArchiveMember> members_of(const std::string& zip) {
  return read_zip([&](void* to, int64_t bytes,
                      int64_t position) { std::memcpy(to, zip.data() + position, static_cast<size_t>(bytes)); },
                  std::ssize(zip), "zip");
}

// The members of an archive in data/, to be modified and rewritten.
struct Changed {
  std::map<std::string, std::string> members;
  json program;
  std::string folder;

  explicit Changed(const std::string& name) {
    const std::string bytes = file_bytes(data_file(name + ".pt2"));
    for (const auto& [member, place] : members_of(bytes))
      members[member] = bytes.substr(static_cast<size_t>(place.begin), static_cast<size_t>(place.bytes));
    folder = members.begin()->first.substr(0, members.begin()->first.find('/') + 1);
    program = json::parse(members.at(folder + "models/model.json"));
  }
  json& nodes() { return program["graph_module"]["graph"]["nodes"]; }
  std::string error() {
    members[folder + "models/model.json"] = program.dump();
    return error_of_zip(zip_of(members));
  }
  std::shared_ptr<ExportedModule> loaded() {
    members[folder + "models/model.json"] = program.dump();
    const TemporaryFolder temporary;
    return load_exported(temporary.write("changed.pt2", zip_of(members)));
  }
  static std::string error_of_zip(const std::string& zip) {
    const TemporaryFolder temporary;
    return error_of<ExportedError>([&] { load_exported(temporary.write("changed.pt2", zip)); });
  }
};

TEST(Archive, IsReadAgainAfterWriting) {
  Changed same("adapted");
  EXPECT_EQ(same.error(), "");
}

TEST(Archive, OtherVersionsAreRefused) {
  for (const std::string version : {"2.8.0", "2.16.0", "3.9.0"}) {
    Changed other("adapted");
    other.program["torch_version"] = version;
    expect_contains(other.error(),
                    "exported by torch " + version + " (schema 8); expected torch 2.9 to 2.15 (schema 8)");
  }
  for (const char* version : {"2.9.1", "2.10.0+cpu", "2.15.0a0+git"}) {
    Changed known("adapted");
    known.program["torch_version"] = version;
    EXPECT_EQ(known.error(), "") << version;
  }
  Changed schema("adapted");
  schema.program["schema_version"]["major"] = 9;
  expect_contains(schema.error(), "(schema 9)");
}

TEST(Archive, UnknownThingsAreNamedWithNodeAndLine) {
  Changed unknown("adapted");
  unknown.nodes()[0]["target"] = "torch.ops.aten.lineal.default";
  const std::string error = unknown.error();
  expect_contains(error, "node 'linear' (torch.ops.aten.lineal.default), linear.py:");
  expect_contains(error, "is not in this libtorch");

  Changed space("adapted");
  space.nodes()[0]["target"] = "torch.ops.mine.linear.default";
  expect_contains(space.error(), "of the namespace 'mine'");
  Changed higher("adapted");
  higher.nodes()[0]["target"] = "torch.ops.higher_order.flex_attention";
  expect_contains(higher.error(), "this higher-order operator is not supported");
  Changed argument("adapted");
  argument.nodes()[0]["inputs"][1]["name"] = "weights";
  expect_contains(argument.error(), "it has no argument 'weights'");
  Changed missing("adapted");
  missing.nodes()[0]["inputs"].erase(1);
  expect_contains(missing.error(), "its argument 'weight' is missing");
  Changed kind("adapted");
  kind.nodes()[0]["inputs"][1]["arg"] = {{"as_string", "x"}};
  expect_contains(kind.error(), "'weight': an argument is a text, expected Tensor");
  Changed value("adapted");
  value.nodes()[0]["inputs"][1]["arg"]["as_tensor"]["name"] = "later";
  expect_contains(value.error(), "nothing before it makes the value 'later'");
  Changed object("adapted");
  object.nodes()[0]["inputs"][1]["arg"] = {{"as_custom_obj", {{"name", "o"}, {"class_fqn", "c"}}}};
  expect_contains(object.error(), "'as_custom_obj'");
}

TEST(Archive, ADictWhoseChildrenHaveNoNamesIsRefused) {
  for (const json& context : {json(), json("[]"), json("")}) {
    Changed archive("adapted");
    json& text = archive.program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"];
    json spec = json::parse(text.get<std::string>());
    json& keywords = spec[1]["children_spec"][1];
    ASSERT_EQ(keywords["type"], "builtins.dict");
    keywords["children_spec"].push_back({{"type", nullptr}, {"context", nullptr}, {"children_spec", json::array()}});
    keywords["context"] = context;
    text = spec.dump();
    expect_contains(archive.error(), "a dict of a structure has children without names");
  }
}

// The text of a context is JSON inside of JSON. To write a deep value as a name would overflow the stack.
TEST(Archive, ADeepContextIsRefused) {
  Changed archive("adapted");
  json& text = archive.program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"];
  json spec = json::parse(text.get<std::string>());
  spec[1]["children_spec"][1]["context"] = std::string(200'000, '[') + std::string(200'000, ']');
  text = spec.dump();
  expect_contains(archive.error(), "nested deeper than");
}

// Collects libtorch's warnings on this thread during its lifetime.
class Warnings {
 public:
  std::string text() const { return handler_.text; }

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text += warning.msg(); }
    std::string text;
  };
  Handler handler_;
  const c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

// tools/export_model.py compares with Python; archives of other tools lack the results.
TEST(Archive, WhatNobodyHasCheckedIsRefused) {
  Changed decomposed("norms_decomposed");
  EXPECT_EQ(decomposed.error(), "");
  const auto without_record = [](const std::string& name) {
    Changed archive(name);
    EXPECT_EQ(archive.members.erase(archive.folder + "extra/tessera.json"), 1u);
    return archive;
  };
  const auto warning_of = [&](const std::string& name) {
    const Warnings warnings;
    EXPECT_EQ(without_record(name).error(), "");
    return warnings.text();
  };
  expect_contains(warning_of("norms_decomposed"), "it is decomposed, which loses torch.no_grad()");
  EXPECT_EQ(warning_of("norms"), "");
  Changed detached = without_record("norms_decomposed");
  detached.nodes()[0]["target"] = "torch.ops.aten.alias.default";
  expect_contains(detached.error(), "it is decomposed");

  const TemporaryFolder temporary;
  const auto model_of = [&](const std::string& name, bool unchecked) {
    const std::string zip = zip_of(without_record(name).members);
    return load_exported(
        temporary.write(name + ".pt2", zip),
        {.init = [](const std::string&, at::Tensor& tensor) { tensor.zero_(); }, .unchecked = unchecked});
  };
  EXPECT_NE(model_of("norms_decomposed", true), nullptr);
  // The record also has ties of tensors without memory, positions of inputs, and modes of random operators.
  const Warnings warnings;
  auto untied = model_of("decoder_meta", true);
  EXPECT_EQ(warnings.text(), "");
  untied = model_of("decoder_meta", false);
  expect_contains(warnings.text(), "does not say which tensors are tied");
  const at::Tensor ids = at::zeros({2, 3}, at::kLong);
  EXPECT_EQ(error_of<std::invalid_argument>([&] { untied->forward(NamedInputs{{"ids", ids}, {"labels", ids}}); }), "");
  expect_contains(error_of<std::invalid_argument>([&] { untied->forward(ids, ids); }),
                  "input 0 is given by position, where the model takes it by name");
  const NamedInputs x = Expected("random").inputs();
  auto random = model_of("random", false);
  random->forward(x);
  random->eval();
  expect_contains(error_of<std::invalid_argument>([&] { random->forward(x); }), "draws numbers in either mode");
  random = model_of("random", true);
  random->eval();
  random->forward(x);
}

TEST(Archive, GuardsThatCannotBeReadAreNamed) {
  const auto with = [](const char* guard) {
    Changed archive("guarded");
    archive.program["guards_code"] = {guard};
    return archive.error();
  };
  for (const char* guard : {"L['x'].size()[0] > L['y']['rows'].size()[0]", "not (L['x'].size()[1]**2 < 7 or False)",
                            "1 < L['x'].stride()[0] <= 4 and L['x'].storage_offset() == 0",
                            "min(3, 4.5, 2) // -2 == -1", "round(2.5) == (5 >> 1) - +0 | 0 & 1",
                            "torch.sym_float(3) / 2 != 1", "L['flat_args'][0].size()[0] > L['flat_args'][1].size()[0]"})
    EXPECT_EQ(with(guard), "") << guard;
  for (const char* guard :
       {"", "1 +", "(1", "L['z'].size()[0] > 1", "L['x'].size()[2] > 1", "L['x'] > 1", "L['x'].dtype == 1", "f(1)",
        "1 if 2 else 3", "L['x", "L['x'].size()[-1] > 0", "min()", "L['flat_args'][2].size()[0] > 1"})
    expect_contains(with(guard), "'" + std::string(guard) + "', cannot be read");
  for (const char* term : {" and True", " == 1", " + 1"}) {
    std::string chain = "1";
    for (int i = 0; i < 300000; ++i) chain += term;
    expect_contains(with(chain.c_str()), "cannot be read");
  }
}

// In Python such a guard raises ZeroDivisionError.
TEST(Archive, GuardsThatCannotBeEvaluatedAreNamed) {
  for (const std::string guard : {"8 % L['x'].size()[0] == 0", "8 / L['x'].size()[0] == 2",
                                  "8 // L['x'].size()[0] == 2", "1.5 | L['x'].size()[0] == 0"}) {
    Changed archive("guarded");
    archive.program["guards_code"] = {guard};
    archive.program["range_constraints"] = json::object();
    const auto model = archive.loaded();
    const auto forward = [&](int64_t x) {
      model->forward(at::ones({x, 4}), ExportedValue::dict({{"rows", at::ones({3, 4})}}));
    };
    expect_contains(error_of<std::invalid_argument>([&] { forward(0); }),
                    "the guard " + guard + " cannot be evaluated");
  }
}

json& arguments_of(Changed& archive, const std::string& operation) {
  for (json& node : archive.nodes())
    if (node["target"].get<std::string>().find(operation) != std::string::npos) return node["inputs"];
  throw std::logic_error("no node " + operation);
}

TEST(Archive, MissingArgumentsOfARegionAreNamed) {
  for (const size_t kept : {0, 1, 2, 3, 4}) {
    Changed archive("control");
    json& arguments = arguments_of(archive, "autocast");
    arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(kept), arguments.end());
    expect_contains(archive.error(), "an argument is missing");
  }
}

// A region of torch.autocast("cuda", enabled=False) does not change the precision of CPUs.
TEST(Archive, ARegionOfAnotherDeviceTypeKeepsTheAutocastOfThisOne) {
  Changed archive("control");
  json& arguments = arguments_of(archive, "autocast");
  arguments[0]["arg"]["as_string"] = "cuda";
  arguments[2]["arg"]["as_bool"] = false;
  const auto changed = archive.loaded();
  const auto bfloat16 = load("control");
  const Expected expected("control");
  const Autocast outer(at::kCPU, at::kBFloat16);
  auto result_of = [&](ExportedModule& model) {
    return model.forward(expected.at("input.x"), expected.at("input.counts").clone())[0].tensor();
  };
  EXPECT_TRUE(torch::equal(result_of(*changed), result_of(*bfloat16)));
}

// Loads an archive in which an expression stands for the symbol s77: `before`, the symbol, `after`.
std::shared_ptr<ExportedModule> adapted_with_size(const std::string& before, const std::string& after) {
  Changed archive("adapted");
  const std::string symbol = "Symbol('s77', positive=True, integer=True)";
  std::string text = archive.program.dump();
  for (size_t at = 0; (at = text.find(symbol, at)) != std::string::npos; at += 100)
    text.replace(at, symbol.size(), before + symbol + after);
  archive.program = json::parse(text);
  return archive.loaded();
}

TEST(Archive, ABatchSizeSetsTheSymbolOfADerivedSize) {
  const auto model = adapted_with_size("Mul(Integer(2), ", ")");
  EXPECT_EQ(model->example_inputs(8).inputs().at(0).second.tensor().size(0), 8);
}

// The size -s - (2^63 - 1) of a dimension has no solution in 64 bits for a size of 1.
TEST(Archive, SizesThatOverflowAreRefused) {
  const auto model = adapted_with_size("Add(Mul(Integer(-1), ", "), Integer(-9223372036854775807))");
  const at::Tensor x = Expected("adapted").at("input.x");
  expect_contains(error_of<std::invalid_argument>([&] { model->forward(x.narrow(0, 0, 1)); }),
                  "is 1, exported as ((-1*s77) + -9223372036854775807)");
}

TEST(Archive, NothingIsUnpickled) {
  Changed pickled("adapted");
  auto& text = pickled.members.at(pickled.folder + "data/weights/model_weights_config.json");
  json config = json::parse(text);
  config["config"]["base.weight"]["use_pickle"] = true;
  text = config.dump();
  expect_contains(pickled.error(), "'base.weight': it is pickled");
}

TEST(Archive, TensorsStayInsideTheirStorage) {
  auto error_with = [](const std::function<void(json&)>& change) {
    Changed archive("adapted");
    auto& text = archive.members.at(archive.folder + "data/weights/model_weights_config.json");
    json config = json::parse(text);
    change(config["config"]["base.weight"]["tensor_meta"]);
    text = config.dump();
    return archive.error();
  };
  const std::string beyond = "'base.weight': it reaches beyond its storage of 144 bytes";
  expect_contains(error_with([](json& meta) { meta["sizes"][0]["as_int"] = 7; }), beyond);
  expect_contains(error_with([](json& meta) { meta["strides"][0]["as_int"] = 600; }), beyond);
  expect_contains(error_with([](json& meta) { meta["strides"][0]["as_int"] = INT64_MAX; }), beyond);
  expect_contains(error_with([](json& meta) { meta["storage_offset"]["as_int"] = 1; }), beyond);
  expect_contains(error_with([](json& meta) { meta["storage_offset"]["as_int"] = -1; }), beyond);
  expect_contains(error_with([](json& meta) { meta["dtype"] = 8; }), beyond);
  expect_contains(error_with([](json& meta) { meta["dtype"] = 99; }), "there is no dtype 99");
  expect_contains(error_with([](json& meta) { meta["sizes"][0]["as_int"] = -1; }), "is negative");
  expect_contains(error_with([](json& meta) { meta["layout"] = 1; }), "it is not an ordinary dense tensor");
  expect_contains(error_with([](json& meta) { meta["sizes"][0]["as_int"] = "6"; }),
                  "'base.weight': the field 'as_int' is string: an integer was expected");
  expect_contains(error_with([](json& meta) { meta["requires_grad"] = 1; }),
                  "'base.weight': the field 'requires_grad' is number: true or false was expected");
}

// Operators that open files, or that trust sizes and indices.
TEST(Archive, DangerousOperatorsAreNotCalled) {
  for (const char* target : {"torch.ops.aten.from_file.default", "torch.ops.aten._reshape_alias.default",
                             "torch.ops.aten._sparse_coo_tensor_unsafe.default",
                             "torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default",
                             "torch.ops.aten.embedding_dense_backward.default"})
    expect_contains(error_of<ExportedError>([&] { find_operator(target, {}); }), "may not call");
  // No other operator of ATen takes a file name.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    for (const auto& argument : op->schema().arguments())
      if (argument.name().find("file") != std::string::npos ||
          (argument.name().find("path") != std::string::npos && argument.type()->kind() == c10::TypeKind::StringType)) {
        EXPECT_EQ(name.name, "aten::from_file");
      }
  }
}

TEST(Archive, DamageIsNoticed) {
  const std::string whole = file_bytes(data_file("adapted.pt2"));
  expect_contains(Changed::error_of_zip("PK"), "too short");
  expect_contains(Changed::error_of_zip(whole.substr(0, whole.size() / 2)), "not a zip archive, or is truncated");
  expect_contains(Changed::error_of_zip(zip_of({{"a/archive_format", "pt3"}})), "not an archive of torch.export");
  expect_contains(Changed::error_of_zip(zip_of({{"a/archive_format", "pt2"}})), "it has 0 programs");
  const TemporaryFolder temporary;
  expect_contains(error_of<ExportedError>([&] { load_exported(temporary / "none.pt2"); }), "No such file");
  // With any byte wrong, loading succeeds or throws its own error.
  std::mt19937_64 random(3);
  for (int times = 0; times < 300; ++times) {
    std::string damaged = whole;
    damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
    try {
      load_exported(temporary.write("damaged.pt2", damaged));
    } catch (const ExportedError&) {
    }
  }
}

TEST(Archive, Crc32IsThatOfZip) {
  EXPECT_EQ(crc32("123456789"), 0xCBF43926U);  // the check value of ISO 3309
  const std::string text = file_bytes(data_file("adapted.pt2")).substr(0, 1000);
  for (size_t bytes = 0; bytes < 40; ++bytes) {  // around the blocks of 16
    uint32_t expected = ~0U;
    for (const char byte : text.substr(0, bytes)) {
      expected ^= static_cast<unsigned char>(byte);
      for (int bit = 0; bit < 8; ++bit) expected = expected >> 1 ^ (0xEDB88320U & (0 - (expected & 1)));
    }
    EXPECT_EQ(crc32(text.substr(0, bytes)), ~expected) << bytes;
    EXPECT_EQ(crc32(text.substr(bytes), crc32(text.substr(0, bytes))), crc32(text)) << bytes;
  }
}

// Every member has a CRC-32. A flipped bit in a tensor's values is noticed when they are read at once, later or by a
// rank. ExportedOptions::unchecked loads them as they are.
TEST(Archive, FlippedBitsAreFound) {
  const std::string whole = file_bytes(data_file("adapted.pt2"));
  const TemporaryFolder temporary;
  int tensors = 0;
  for (const auto& [name, place] : members_of(whole)) {
    if (place.bytes == 0) continue;
    const bool is_tensor = name.find("/weights/weight_") != std::string::npos;
    std::string damaged = whole;
    damaged[static_cast<size_t>(place.begin + place.bytes / 2)] ^= 1;
    const auto file = temporary.write("damaged.pt2", damaged);
    const std::string error = error_of<ExportedError>([&] { load_exported(file); });
    if (!is_tensor) continue;  // other members may be unused
    ++tensors;
    expect_contains(error, "is damaged: its CRC-32 is ");
    EXPECT_NE(load_exported(file, {.unchecked = true}), nullptr);
    const auto later = deferred([&] { return load_exported(file); });
    expect_contains(error_of<ExportedError>([&] { materialize(*later); }),
                    std::filesystem::path(file).string() + ": 'data/weights/weight_");
    std::atomic<int> threw{0};
    on_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
      try {
        FullyShardedDataParallel fsdp(deferred([&] { return load_exported(file); }), comm);
      } catch (const std::exception& failure) {
        ++threw;
      }
    });
    EXPECT_GT(threw, 0) << name;
  }
  EXPECT_GT(tensors, 3);
}

// References within an archive that lead to nothing, or to another thing: a renamed bias would be passed as None.
TEST(Archive, ReferencesWithinItAreCompared) {
  const auto signature_error = [](const std::function<void(json&)>& change) {
    Changed archive("norms_decomposed");
    change(archive.program["graph_module"]["signature"]);
    return archive.error();
  };
  const auto spec_of = [](json& specs, const char* kind) -> json& {
    for (json& spec : specs)
      if (spec.contains(kind)) return spec[kind];
    throw std::logic_error(kind);
  };
  for (const char* kind : {"parameter", "buffer", "user_input"})
    expect_contains(signature_error([&](json& signature) {
                      json& argument = spec_of(signature["input_specs"], kind)["arg"];
                      (argument.contains("name") ? argument : argument["as_tensor"])["name"] = "other";
                    }),
                    "in the place of the signature's 'other' among the inputs");
  for (const char* kind : {"buffer_mutation", "user_output"})
    expect_contains(signature_error([&](json& signature) {
                      json& argument = spec_of(signature["output_specs"], kind)["arg"];
                      (argument.contains("name") ? argument : argument["as_tensor"])["name"] = "other";
                    }),
                    "in the place of the signature's 'other' among the outputs");
  expect_contains(signature_error([](json& signature) { signature["input_specs"].erase(1); }),
                  "another number of inputs");
  expect_contains(signature_error([](json& signature) { signature["output_specs"].erase(0); }),
                  "another number of outputs");
  expect_contains(signature_error([&](json& signature) {
                    const json parameter = spec_of(signature["input_specs"], "parameter")["parameter_name"];
                    spec_of(signature["output_specs"], "buffer_mutation")["buffer_name"] = parameter;
                  }),
                  "as a buffer, which it is not");
  Changed swapped("adapted");
  auto& inputs = swapped.program["graph_module"]["graph"]["inputs"];
  std::swap(inputs[0], inputs[1]);
  expect_contains(swapped.error(), "among the inputs");
  Changed reshaped("adapted");
  auto& text = reshaped.members.at(reshaped.folder + "data/weights/model_weights_config.json");
  json config = json::parse(text);
  auto& sizes = config["config"]["base.weight"]["tensor_meta"]["sizes"];
  sizes[0]["as_int"] = sizes[0]["as_int"].get<int64_t>() - 1;
  text = config.dump();
  expect_contains(reshaped.error(), "'base.weight' is [");
}

// All values of a tree except its root.
void collect_values(json& tree, std::vector<json*>& values) {
  if (!tree.is_structured()) return;
  for (json& child : tree) {
    values.push_back(&child);
    collect_values(child, values);
  }
}

// Changes one value: to another of the tree, to a number or another kind, or removes it.
void change(json& tree, std::mt19937_64& random) {
  std::vector<json*> values;
  collect_values(tree, values);
  json& value = *values[random() % values.size()];
  switch (random() % 6) {
    case 0: {
      const json other = *values[random() % values.size()];
      value = other;
      break;
    }
    case 1:
      value = std::array<int64_t, 6>{-1, 0, 1, 2, 7, int64_t{1} << 62}[random() % 6];
      break;
    case 2:
      value = nullptr;
      break;
    case 3:
      if (value.is_array() && !value.empty()) value.erase(random() % value.size());
      break;
    case 4:
      if (value.is_array() && !value.empty()) value.push_back(json(value[random() % value.size()]));
      break;
    default:
      value = std::array<const char*, 4>{"", "x", "torch.ops.aten.mm.default", "as_tensor"}[random() % 4];
  }
}

// Usually changes the graph; sometimes tensor metadata, ranges and guards, or the record of tools/export_model.py.
void change_part(Changed& archive, std::mt19937_64& random) {
  const auto change_member = [&](const std::string& name) {
    std::string& text = archive.members.at(archive.folder + name);
    json tree = json::parse(text);
    change(tree, random);
    text = tree.dump();
  };
  switch (random() % 8) {
    case 0:
      return change_member("data/weights/model_weights_config.json");
    case 1:
      return change_member("extra/tessera.json");
    case 2: {
      json others = archive.program;
      others.erase("graph_module");
      change(others, random);
      others["graph_module"] = std::move(archive.program["graph_module"]);
      archive.program = std::move(others);
      return;
    }
    default:
      change(archive.program["graph_module"], random);
  }
}

// A changed graph throws its own error when loaded or run, or an operator throws. Tries some hundred changes, or for
// the seconds that `make attack` sets.
TEST(Archive, GraphsThatWereChangedAreRefusedOrRun) {
  const Warnings not_shown;
  const char* text = std::getenv("TESSERA_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(text != nullptr ? std::stoi(text) : 0);
  const char* seed_text = std::getenv("TESSERA_FUZZ_SEED");
  const uint64_t first_seed = seed_text != nullptr ? std::stoull(seed_text)
                              : text != nullptr    ? std::random_device()()
                                                   : 1;
  int64_t loaded = 0, tried = 0;
  for (uint64_t seed = first_seed; text != nullptr ? std::chrono::steady_clock::now() < end : tried < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    // Shows the seed to start from after a crash (TESSERA_FUZZ_SEED); tries thousands a second.
    if (text != nullptr && (tried % 1024 == 0 || seed_text != nullptr)) std::cout << "from seed " << seed << std::endl;
    std::mt19937_64 random(seed);
    const std::string name =
        std::array{"control", "decoder", "norms", "energy", "recurrent", "guarded", "random"}[random() % 7];
    Changed changed(name);
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) change_part(changed, random);
    changed.members[changed.folder + "models/model.json"] = changed.program.dump();
    const TemporaryFolder temporary;
    ++tried;
    std::shared_ptr<ExportedModule> model;
    try {
      model = load_exported(temporary.write("changed.pt2", zip_of(changed.members)));
    } catch (const ExportedError&) {
      continue;
    }
    ++loaded;
    try {
      model->forward(Expected(name).inputs());
    } catch (const std::exception&) {
    }
  }
  EXPECT_GT(loaded, tried / 20);
  EXPECT_LT(loaded, tried);
}

TEST(NumberStep, DividesAsPythonDoes) {
  const auto result = [](const char* target, double a, double b) {
    return NumberStep::find(target, 2)({a, b}).toDouble();
  };
  EXPECT_EQ(result("_operator.floordiv", 7.5, -2), -4);
  EXPECT_EQ(result("_operator.floordiv", 1, 0.1), 9);
  EXPECT_EQ(result("_operator.floordiv", -0.3, 0.1), -3);
  EXPECT_EQ(result("_operator.mod", 7.5, -2), -0.5);
  EXPECT_EQ(result("_operator.truediv", 7.5, -2), -3.75);
  for (const char* target : {"_operator.floordiv", "_operator.mod", "_operator.truediv"})
    EXPECT_THROW(result(target, 1, 0), c10::Error) << target;
}

TEST(Expression, ComputesAsPythonDoes) {
  const auto value = [](const char* text) { return Expression::parse(text).evaluate({{"s0", 7}, {"s1", -3}}); };
  EXPECT_EQ(value("Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(1))"), 15);
  EXPECT_EQ(value("FloorDiv(Symbol('s1'), Integer(2))"), -2);
  EXPECT_EQ(value("PythonMod(Symbol('s1'), Integer(2))"), 1);
  EXPECT_EQ(value("Pow(Symbol('s0'), Integer(2))"), 49);
  EXPECT_EQ(value("Max(Integer(1), Symbol('s0'), Integer(3))"), 7);
  EXPECT_EQ(value("FloorDiv(Integer(1), Integer(0))"), std::nullopt);
  EXPECT_EQ(value("Mul(Integer(9223372036854775807), Integer(2))"), std::nullopt);
  EXPECT_EQ(value("Symbol('s2')"), std::nullopt);
  for (const char* text :
       {"", "Integer()", "Integer(1", "Add(Integer(1)))", "exp(Integer(1))", "Symbol('')", "Mod(Integer(1))"})
    EXPECT_THROW(Expression::parse(text), ExportedError) << text;
}

}  // namespace
}  // namespace tessera::exported_test
