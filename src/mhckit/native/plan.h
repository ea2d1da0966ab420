// A call's allocations and launches, worked out once (kernels/_plan.py) and repeated here.
//
// The values of a call are, in this order: pointers to its tensors, to its results, into its buffer.

#pragma once

#include <cuda.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace mhckit {

// What is called of the driver and of torch's CUDA part, neither of which this is linked with.
struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**) = nullptr;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  CUresult (*explain)(CUresult, const char**) = nullptr;
  CUresult (*context)(CUcontext*) = nullptr;
  CUresult (*set_context)(CUcontext) = nullptr;
  CUresult (*primary_context)(CUcontext*, CUdevice) = nullptr;
  int32_t (*current_stream)(int32_t device, void** stream) = nullptr;
};

inline Driver driver;

inline void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) {
    return;
  }
  const char* reason = nullptr;
  if (driver.explain != nullptr) {
    driver.explain(result, &reason);
  }
  TORCH_CHECK(false, "mhckit: ", what, ": ", reason ? reason : "no reason given", " (CUDA error ", int(result), ")");
}

// A thread that has done nothing on a GPU so far has no context, and the driver, unlike its runtime, makes it none.
inline void need_context(c10::DeviceIndex device) {
  CUcontext context = nullptr;
  check(driver.context(&context), "no current context");
  if (context == nullptr) {
    check(driver.primary_context(&context, device), "no context of the device");
    check(driver.set_context(context), "the context of the device cannot be made current");
  }
}

using Values = c10::SmallVector<uint64_t, 64>;
constexpr size_t kMaxMaps = 16;  // of one launch

// A matrix that the copy engine moves tile by tile: rows without gaps, the last dimension first.
struct TensorMap {
  size_t slot;
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  cuuint64_t shape[2];
  cuuint64_t row_bytes;
  cuuint32_t tile[2];

  void encode(uint64_t address, CUtensorMap& map) const {
    const cuuint32_t every_element[2] = {1, 1};
    const auto result = driver.encode(
        &map, type, 2, reinterpret_cast<void*>(address), shape, &row_bytes, tile, every_element,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result, "a tensor could not be described for the copy engine");
  }
};

struct Parameter {
  enum Kind { pointer, constant, map } kind;
  size_t index;  // of a value, of a constant, of a map
};

struct Launch {
  CUfunction function;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
  bool dependent;  // may begin while the launch before it ends
  std::vector<Parameter> parameters;
  std::vector<uint64_t> constants;
  std::vector<TensorMap> maps;

  void submit(const Values& values, CUstream stream) const {
    std::array<CUtensorMap, kMaxMaps> encoded;
    for (size_t i = 0; i < maps.size(); ++i) {
      maps[i].encode(values[maps[i].slot], encoded[i]);
    }
    c10::SmallVector<void*, 64> arguments;
    for (const auto& [kind, index] : parameters) {
      const void* argument = kind == Parameter::pointer ? static_cast<const void*>(&values[index])
          : kind == Parameter::constant                 ? static_cast<const void*>(&constants[index])
                                                        : static_cast<const void*>(&encoded[index]);
      arguments.push_back(const_cast<void*>(argument));
    }
    uint64_t no_scratch = 0;  // Triton 3.6 takes two pointers to scratch memory, which ours do not use
    arguments.push_back(&no_scratch);
    arguments.push_back(&no_scratch);
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = grid[0];
    config.gridDimY = grid[1];
    config.gridDimZ = grid[2];
    config.blockDimX = threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    check(driver.launch(&config, function, arguments.data(), nullptr), "a kernel could not be launched");
  }
};

struct Layout {
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  at::ScalarType dtype;
};

struct Plan {
  c10::Device device = c10::kCPU;
  std::vector<Layout> results;
  std::vector<int64_t> offsets;  // into the buffer
  int64_t buffer_bytes = 0;
  std::vector<Launch> launches;

  // Whether it could be done now: not with a tensor that is not aligned, nor where another device is the current one.
  bool run(at::ArrayRef<at::Tensor> tensors, std::vector<at::Tensor>& allocated) const {
    Values values;
    uint64_t all = 0;
    for (const auto& tensor : tensors) {
      values.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
      all |= values.back();
    }
    if (all % 16 != 0 || !is_current()) {
      return false;
    }
    for (const auto& [size, stride, dtype] : results) {
      allocated.push_back(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(device)));
      values.push_back(reinterpret_cast<uint64_t>(allocated.back().data_ptr()));
    }
    at::Tensor buffer;
    if (buffer_bytes > 0) {
      buffer = at::empty_strided({buffer_bytes}, {1}, at::TensorOptions().dtype(at::kByte).device(device));
      for (const auto offset : offsets) {
        values.push_back(reinterpret_cast<uint64_t>(buffer.data_ptr()) + offset);
      }
    }
    void* stream = nullptr;
    if (device.is_cuda()) {
      need_context(device.index());
      TORCH_CHECK(driver.current_stream(device.index(), &stream) == 0, "mhckit: no current stream");
    }
    for (const auto& launch : launches) {
      launch.submit(values, static_cast<CUstream>(stream));
    }
    return true;
  }

 private:
  // Without a GPU, in tests, launches are only noted.
  bool is_current() const {
    return device.is_cpu() || c10::impl::VirtualGuardImpl(device.type()).getDevice().index() == device.index();
  }
};

}  // namespace mhckit
