// Python's view of this folder: plans and calls are capsules, and __init__.py says what is done with them.

#include <Python.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "call.h"

namespace mhckit {
namespace {

constexpr const char* kPlan = "mhckit.Plan";
constexpr const char* kCalls = "mhckit.Calls";

// Items of Python's tuples, of which Python's side of this module makes all.
pybind11::handle item(pybind11::handle tuple, size_t index) {
  return PyTuple_GET_ITEM(tuple.ptr(), index);
}

template <class T>
std::vector<T> numbers(pybind11::handle tuple) {
  return tuple.cast<std::vector<T>>();
}

template <class T>
T& inside(PyObject* capsule, const char* name) {
  auto* pointer = static_cast<T*>(PyCapsule_GetPointer(capsule, name));
  if (pointer == nullptr) {
    throw python_error();
  }
  return *pointer;
}

template <class T>
PyObject* capsule(std::unique_ptr<T> owned, const char* name) {
  PyObject* made = PyCapsule_New(owned.get(), name, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
  });
  if (made != nullptr) {
    owned.release();
  }
  return made;
}

// ("pointer", slot), ("constant", bits) or ("map", slot, type, swizzle, element bytes, shape, tile)
void add_parameter(Launch& launch, pybind11::handle description) {
  const auto kind = item(description, 0).cast<std::string>();
  if (kind == "pointer") {
    launch.parameters.push_back({Parameter::pointer, item(description, 1).cast<size_t>()});
  } else if (kind == "constant") {
    launch.parameters.push_back({Parameter::constant, launch.constants.size()});
    launch.constants.push_back(item(description, 1).cast<uint64_t>());
  } else {
    const auto shape = numbers<uint64_t>(item(description, 5));
    const auto tile = numbers<uint32_t>(item(description, 6));
    TORCH_CHECK(launch.maps.size() < kMaxMaps, "more than ", kMaxMaps, " tensors to describe for a launch");
    launch.parameters.push_back({Parameter::map, launch.maps.size()});
    launch.maps.push_back(TensorMap{
        item(description, 1).cast<size_t>(),
        static_cast<CUtensorMapDataType>(item(description, 2).cast<int>()),
        static_cast<CUtensorMapSwizzle>(item(description, 3).cast<int>()),
        {shape[1], shape[0]},
        shape[1] * item(description, 4).cast<uint64_t>(),
        {tile[1], tile[0]}});
  }
}

// (function, grid, threads, bytes of shared memory, dependent, parameters)
Launch launch_of(pybind11::handle description) {
  Launch launch{};
  launch.function = reinterpret_cast<CUfunction>(item(description, 0).cast<uint64_t>());
  const auto grid = numbers<unsigned>(item(description, 1));
  std::copy(grid.begin(), grid.end(), launch.grid);
  launch.threads = item(description, 2).cast<unsigned>();
  launch.shared_bytes = item(description, 3).cast<unsigned>();
  launch.dependent = item(description, 4).cast<bool>();
  for (const auto parameter : item(description, 5)) {
    add_parameter(launch, parameter);
  }
  return launch;
}

// setup(launch, encode, explain, context, set_context, primary_context, current_stream): addresses of functions, or 0
PyObject* setup(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  auto address = [&](size_t index) { return reinterpret_cast<void*>(item(args, index).cast<uint64_t>()); };
  driver.launch = reinterpret_cast<decltype(driver.launch)>(address(0));
  driver.encode = reinterpret_cast<decltype(driver.encode)>(address(1));
  driver.explain = reinterpret_cast<decltype(driver.explain)>(address(2));
  driver.context = reinterpret_cast<decltype(driver.context)>(address(3));
  driver.set_context = reinterpret_cast<decltype(driver.set_context)>(address(4));
  driver.primary_context = reinterpret_cast<decltype(driver.primary_context)>(address(5));
  driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(address(6));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// plan(device, layouts, offsets, bytes of the buffer, launches)
PyObject* plan(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  auto made = std::make_shared<Plan>();
  made->device = reinterpret_cast<THPDevice*>(item(args, 0).ptr())->device;
  for (const auto layout : item(args, 1)) {
    auto* dtype = reinterpret_cast<THPDtype*>(item(layout, 2).ptr());
    made->results.push_back({numbers<int64_t>(item(layout, 0)), numbers<int64_t>(item(layout, 1)), dtype->scalar_type});
  }
  made->offsets = numbers<int64_t>(item(args, 2));
  made->buffer_bytes = item(args, 3).cast<int64_t>();
  for (const auto launch : item(args, 4)) {
    made->launches.push_back(launch_of(launch));
  }
  return capsule(std::make_unique<std::shared_ptr<const Plan>>(std::move(made)), kPlan);
  END_HANDLE_TH_ERRORS
}

// run(plan, tensors): its results, or None where it cannot be run now
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& plan = inside<std::shared_ptr<const Plan>>(args[0], kPlan);
  std::vector<at::Tensor> tensors, allocated;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    tensors.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(args[1], i)));
  }
  {
    pybind11::gil_scoped_release no_gil;
    if (!plan->run(tensors, allocated)) {
      allocated.clear();
    }
  }
  if (allocated.empty()) {
    Py_RETURN_NONE;
  }
  PyObject* results = PyTuple_New(allocated.size());
  for (size_t i = 0; i < allocated.size(); ++i) {
    PyTuple_SET_ITEM(results, i, THPVariable_Wrap(allocated[i]));
  }
  return results;
  END_HANDLE_TH_ERRORS
}

// calls(number of tensors, name, ready)
PyObject* calls(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  auto ready = std::make_shared<Shared>(item(args, 2).ptr());
  auto name = item(args, 1).cast<std::string>();
  return capsule(std::make_unique<Calls>(item(args, 0).cast<size_t>(), std::move(name), std::move(ready)), kCalls);
  END_HANDLE_TH_ERRORS
}

Saved saved_of(pybind11::handle description) {
  if (description.is_none()) {
    return {Saved::nothing, 0};
  }
  const bool is_input = item(description, 0).cast<std::string>() == "input";
  return {is_input ? Saved::input : Saved::output, item(description, 1).cast<size_t>()};
}

// keep(calls, arguments of a call, forward, visible, alone, materialize, saved, backward)
PyObject* keep(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  auto& known = inside<Calls>(item(args, 0).ptr(), kCalls);
  const auto call = item(args, 1);
  auto kind = std::make_shared<Kind>();
  for (size_t i = 0; i < known.tensors(); ++i) {
    PyObject* argument = item(call, i).ptr();
    const auto tensor = argument == Py_None ? at::Tensor() : THPVariable_Unpack(argument);
    kind->types.push_back(Py_TYPE(argument));
    kind->guards.emplace_back(tensor);
    kind->requires_grad.push_back(tensor.defined() && tensor.requires_grad());
  }
  for (Py_ssize_t i = known.tensors(); i < PyTuple_GET_SIZE(call.ptr()); ++i) {
    kind->constants.push_back(std::make_unique<Shared>(item(call, i).ptr()));
  }
  kind->grad_mode = at::GradMode::is_enabled();
  kind->forward = repeat_of(item(args, 2).ptr());
  kind->visible = item(args, 3).cast<size_t>();
  kind->alone = item(args, 4).cast<bool>();
  kind->materialize = item(args, 5).cast<bool>();
  for (const auto description : item(args, 6)) {
    kind->saved.push_back(saved_of(description));
  }
  kind->backward = std::make_unique<Shared>(item(args, 7).ptr());
  kind->name = known.name();
  kind->ready = known.ready();
  known.keep(call.ptr(), std::move(kind));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// call(calls, arguments): the results, or None
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* results = inside<Calls>(args[0], kCalls).call(args[1]);
  if (results == nullptr && !PyErr_Occurred()) {
    Py_RETURN_NONE;
  }
  return results;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, nullptr},
    {"plan", plan, METH_VARARGS, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL, nullptr},
    {"calls", calls, METH_VARARGS, nullptr},
    {"keep", keep, METH_VARARGS, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_mhckit_native", nullptr, -1, methods, nullptr, nullptr, nullptr,
                          nullptr};

}  // namespace

Repeat repeat_of(PyObject* description) {
  return {
      inside<std::shared_ptr<const Plan>>(item(description, 0).ptr(), kPlan),
      numbers<int>(item(description, 1)),
      numbers<int>(item(description, 2))};
}

}  // namespace mhckit

PyMODINIT_FUNC PyInit__mhckit_native() {
  return PyModule_Create(&mhckit::definition);
}
