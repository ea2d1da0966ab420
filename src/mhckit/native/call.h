// Calls of one operator, each kind of which has a plan, and their place in autograd's graph.

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "guard.h"
#include "plan.h"

namespace mhckit {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);

constexpr size_t kMaxKinds = 512;  // beyond them, as with a new number of tokens in every batch, all are forgotten
constexpr size_t kMaxBackwards = 16;
constexpr int kAbsent = -1;

// A Python object that may be dropped by any thread.
class Shared {
 public:
  explicit Shared(PyObject* object) : object_(object) {
    Py_INCREF(object_);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() {
    if (Py_IsInitialized()) {
      pybind11::gil_scoped_acquire gil;
      Py_DECREF(object_);
    }
  }
  PyObject* get() const {
    return object_;
  }

 private:
  PyObject* object_;
};

// A plan, which of the values at hand its tensors are, and which of its results are whose.
struct Repeat {
  std::shared_ptr<const Plan> plan;
  std::vector<int> takes;
  std::vector<int> gives;  // or kAbsent

  // The results, undefined where one is absent; nothing where the plan cannot be run now.
  std::optional<variable_list> run(at::ArrayRef<at::Tensor> values) const {
    std::vector<at::Tensor> tensors, allocated;
    tensors.reserve(takes.size());
    for (const auto which : takes) {
      tensors.push_back(values[which]);
    }
    if (!plan->run(tensors, allocated)) {
      return std::nullopt;
    }
    variable_list results(gives.size());
    for (size_t i = 0; i < gives.size(); ++i) {
      if (gives[i] != kAbsent) {
        results[i] = allocated[gives[i]];
      }
    }
    return results;
  }
};

// A backward of a kind of calls: for some gradients that are given, and some that are needed.
struct KnownBackward {
  uint64_t needed;
  std::vector<Guard> guards;  // of gradients, then of what was saved
  Repeat repeat;

  bool matches(uint64_t wanted, at::ArrayRef<at::Tensor> values) const {
    if (wanted != needed || values.size() != guards.size()) {
      return false;
    }
    for (size_t i = 0; i < guards.size(); ++i) {
      if (!guards[i].matches(values[i])) {
        return false;
      }
    }
    return true;
  }
};

struct Saved {
  enum Kind { nothing, input, output } kind;
  size_t index;
};

struct Kind {
  std::vector<PyTypeObject*> types;
  std::vector<Guard> guards;
  std::vector<bool> requires_grad;
  std::vector<std::unique_ptr<Shared>> constants;
  bool grad_mode;
  Repeat forward;
  size_t visible;  // so many outputs, the first, are results
  bool alone;      // one result, not a tuple of them
  bool materialize;
  std::vector<Saved> saved;
  std::string name;
  std::shared_ptr<Shared> ready;      // () -> whether kernels may be launched from here
  std::unique_ptr<Shared> backward;   // (gradients, saved, needs) -> (gradients, how to repeat that or None)

  bool differentiable() const {
    return grad_mode && std::find(requires_grad.begin(), requires_grad.end(), true) != requires_grad.end();
  }

  bool matches(PyObject* args, at::ArrayRef<at::Tensor> tensors) const {
    if (grad_mode != at::GradMode::is_enabled()) {
      return false;
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (Py_TYPE(PyTuple_GET_ITEM(args, i)) != types[i] || !guards[i].matches(tensors[i]) ||
          (tensors[i].defined() && tensors[i].requires_grad() != requires_grad[i])) {
        return false;
      }
    }
    for (size_t i = 0; i < constants.size(); ++i) {
      const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(args, tensors.size() + i), constants[i]->get(), Py_EQ);
      if (same < 0) {
        throw python_error();
      }
      if (same == 0) {
        return false;
      }
    }
    return true;
  }

  std::shared_ptr<const KnownBackward> find_backward(uint64_t needed, at::ArrayRef<at::Tensor> values) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : backwards_) {
      if (known->matches(needed, values)) {
        return known;
      }
    }
    return nullptr;
  }

  void keep_backward(std::shared_ptr<const KnownBackward> known) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (backwards_.size() >= kMaxBackwards) {
      backwards_.clear();
    }
    backwards_.push_back(std::move(known));
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<const KnownBackward>> backwards_;
};

// Reads (plan, takes, gives), as Python describes a Repeat; in module.cpp.
Repeat repeat_of(PyObject* description);

// Python owns its errors by thread; autograd hands them to whoever waits for the backward.
[[noreturn]] inline void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

struct Backward : Node {
  std::shared_ptr<Kind> kind;
  std::vector<SavedVariable> saved;

  std::string name() const override {
    return kind->name;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) {
      variable.reset_data();
    }
  }

  // No `override`: earlier torches declare it otherwise, and then theirs says that it is not implemented.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd does not know ", name(), ", which C++ made: set MHCKIT_NATIVE=0 in the environment");
  }

  variable_list apply(variable_list&& gradients) override {
    variable_list values = std::move(gradients);
    for (size_t i = 0; i < values.size(); ++i) {
      if (kind->materialize && !values[i].defined()) {
        values[i] = input_metadata(i).zeros_like();
      }
    }
    const size_t given = values.size();
    unpack(values);
    uint64_t needed = 0;
    for (size_t i = 0; i < num_outputs(); ++i) {
      needed |= uint64_t(task_should_compute_output(i)) << i;
    }
    if (!at::GradMode::is_enabled() && may_repeat()) {
      if (const auto known = kind->find_backward(needed, values)) {
        if (auto results = known->repeat.run(values)) {
          return std::move(*results);
        }
      }
    }
    return in_python(values, given, needed);
  }

 private:
  void unpack(variable_list& values) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < saved.size(); ++i) {
      const auto& [origin, index] = kind->saved[i];
      const bool own = origin == Saved::output && index < kind->visible;
      values.push_back(saved[i].unpack(own ? getptr() : NodePointer()));
    }
  }

  bool may_repeat() const {
    pybind11::gil_scoped_acquire gil;
    PyObject* answer = PyObject_CallNoArgs(kind->ready->get());
    if (answer == nullptr) {
      raise_python_error();
    }
    const bool may = answer == Py_True;
    Py_DECREF(answer);
    return may;
  }

  variable_list in_python(const variable_list& values, size_t given, uint64_t needed) {
    pybind11::gil_scoped_acquire gil;
    auto wrapped = [&](size_t begin, size_t end) {
      auto tuple = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(end - begin));
      for (size_t i = begin; i < end; ++i) {
        PyTuple_SET_ITEM(tuple.ptr(), i - begin, THPVariable_Wrap(values[i]));
      }
      return tuple;
    };
    auto needs = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(num_outputs()));
    for (size_t i = 0; i < num_outputs(); ++i) {
      PyTuple_SET_ITEM(needs.ptr(), i, PyBool_FromLong(needed >> i & 1));
    }
    const auto answer = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunctionObjArgs(
        kind->backward->get(), wrapped(0, given).ptr(), wrapped(given, values.size()).ptr(), needs.ptr(), nullptr));
    if (!answer) {
      raise_python_error();
    }
    PyObject* returned = PyTuple_GET_ITEM(answer.ptr(), 0);
    PyObject* description = PyTuple_GET_ITEM(answer.ptr(), 1);
    if (description != Py_None && kind->find_backward(needed, values) == nullptr) {
      std::vector<Guard> guards(values.begin(), values.end());
      kind->keep_backward(std::make_shared<KnownBackward>(
          KnownBackward{needed, std::move(guards), repeat_of(description)}));
    }
    variable_list results(num_outputs());
    for (size_t i = 0; i < num_outputs(); ++i) {
      PyObject* gradient = PyTuple_GET_ITEM(returned, i);
      if (gradient != Py_None) {
        results[i] = THPVariable_Unpack(gradient);
      }
    }
    return results;
  }
};

// torch 2.11 shares nodes by std::shared_ptr, 2.13 counts references in the node itself.
template <class T>
std::shared_ptr<T> make_node(std::shared_ptr<Node>*) {
  return std::shared_ptr<T>(new T, [](T* node) { deleteNode(node); });
}
template <class T>
c10::intrusive_ptr<T> make_node(c10::intrusive_ptr<Node>*) {
  return c10::make_intrusive<T>();
}

class Calls {
  using Bucket = std::shared_ptr<const std::vector<std::shared_ptr<Kind>>>;

 public:
  Calls(size_t tensors, std::string name, std::shared_ptr<Shared> ready)
      : tensors_(tensors), name_(std::move(name)), ready_(std::move(ready)) {}

  size_t tensors() const {
    return tensors_;
  }
  const std::string& name() const {
    return name_;
  }
  const std::shared_ptr<Shared>& ready() const {
    return ready_;
  }

  void keep(PyObject* args, std::shared_ptr<Kind> kind) {
    const auto tensors = tensors_of(args);
    if (!tensors || find(args, *tensors) != nullptr) {
      return;
    }
    std::unordered_map<size_t, Bucket> forgotten;  // at the end: dropping a Python object may run Python, and call
    if (count_++ >= kMaxKinds) {
      forgotten.swap(kinds_);
      count_ = 1;
    }
    auto& bucket = kinds_[hash((*tensors)[0])];
    auto kinds = bucket ? std::make_shared<std::vector<std::shared_ptr<Kind>>>(*bucket)
                        : std::make_shared<std::vector<std::shared_ptr<Kind>>>();
    kinds->push_back(std::move(kind));
    bucket = std::move(kinds);
  }

  // The results as Python gets them, a new reference; nullptr where no such call is known or can be repeated now.
  PyObject* call(PyObject* args) const {
    const auto tensors = tensors_of(args);
    if (!tensors) {
      return nullptr;
    }
    const auto kind = find(args, *tensors);
    return kind == nullptr ? nullptr : repeat(kind, *tensors);
  }

 private:
  // Nothing where one of them is of a kind that only Python knows what to do with.
  std::optional<variable_list> tensors_of(PyObject* args) const {
    variable_list tensors(tensors_);
    for (size_t i = 0; i < tensors_; ++i) {
      PyObject* argument = PyTuple_GET_ITEM(args, i);
      if (argument == Py_None) {
        continue;
      }
      if (!THPVariable_CheckTypeExact(Py_TYPE(argument))) {
        return std::nullopt;
      }
      tensors[i] = THPVariable_Unpack(argument);
    }
    return tensors;
  }

  std::shared_ptr<Kind> find(PyObject* args, const variable_list& tensors) const {
    const auto found = kinds_.find(hash(tensors[0]));
    if (found == kinds_.end()) {
      return nullptr;
    }
    // A reference of its own: comparing constants may run Python, and another thread may keep or forget meanwhile.
    const auto kinds = found->second;
    for (const auto& kind : *kinds) {
      if (kind->matches(args, tensors)) {
        return kind;
      }
    }
    return nullptr;
  }

  static size_t hash(const at::Tensor& tensor) {
    size_t seed = 0;
    if (tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      for (const auto size : tensor.sizes()) {
        seed = seed * 1000003 + size;
      }
    }
    return seed;
  }

  static PyObject* repeat(const std::shared_ptr<Kind>& kind, const variable_list& tensors) {
    std::optional<variable_list> outputs;
    {
      pybind11::gil_scoped_release no_gil;
      outputs = kind->forward.run(tensors);
    }
    if (!outputs) {
      return nullptr;
    }
    if (kind->differentiable()) {
      connect(kind, tensors, *outputs);
    }
    if (kind->alone) {
      return THPVariable_Wrap((*outputs)[0]);
    }
    PyObject* results = PyTuple_New(kind->visible);
    for (size_t i = 0; i < kind->visible; ++i) {
      PyTuple_SET_ITEM(results, i, THPVariable_Wrap((*outputs)[i]));
    }
    return results;
  }

  static void connect(const std::shared_ptr<Kind>& kind, const variable_list& tensors, const variable_list& outputs) {
    auto node = make_node<Backward>(static_cast<NodePointer*>(nullptr));
    node->kind = kind;
    node->set_next_edges(torch::autograd::collect_next_edges(tensors));
    for (size_t i = 0; i < kind->visible; ++i) {
      torch::autograd::set_history(outputs[i], node);
    }
    for (const auto& [origin, index] : kind->saved) {
      if (origin == Saved::nothing) {
        node->saved.emplace_back();
      } else if (origin == Saved::input) {
        node->saved.emplace_back(tensors[index], false);
      } else {
        node->saved.emplace_back(outputs[index], index < kind->visible);
      }
    }
  }

  size_t tensors_;
  std::string name_;
  std::shared_ptr<Shared> ready_;
  size_t count_ = 0;
  std::unordered_map<size_t, Bucket> kinds_;
};

}  // namespace mhckit
