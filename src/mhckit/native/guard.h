// Recognising a tensor like an earlier one: everything but its values.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <vector>

namespace mhckit {

// What torch's dispatcher goes by, modes like autocast included.
inline uint64_t keys_of(const at::Tensor& tensor) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
}

class Guard {
 public:
  explicit Guard(const at::Tensor& tensor)
      : defined_(tensor.defined()),
        keys_(defined_ ? keys_of(tensor) : 0),
        dtype_(defined_ ? tensor.scalar_type() : at::ScalarType::Undefined),
        device_(defined_ ? tensor.device() : c10::Device(c10::kCPU)),
        size_(defined_ ? tensor.sizes().vec() : std::vector<int64_t>()),
        stride_(defined_ ? tensor.strides().vec() : std::vector<int64_t>()) {}

  // Keys first: they say whether a tensor has sizes at all.
  bool matches(const at::Tensor& tensor) const {
    if (!defined_ || !tensor.defined()) {
      return defined_ == tensor.defined();
    }
    return keys_of(tensor) == keys_ && tensor.scalar_type() == dtype_ && tensor.device() == device_ &&
        tensor.sizes() == at::IntArrayRef(size_) && tensor.strides() == at::IntArrayRef(stride_);
  }

 private:
  bool defined_;
  uint64_t keys_;
  at::ScalarType dtype_;
  c10::Device device_;
  std::vector<int64_t> size_;
  std::vector<int64_t> stride_;
};

}  // namespace mhckit
