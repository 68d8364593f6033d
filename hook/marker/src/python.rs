//! The part of Python's limited C API that the marker uses. The layouts are those of the stable ABI on 64-bit builds
//! with the GIL; free-threaded builds do not load abi3 libraries.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int, c_void};

/// `PYTHON_ABI_VERSION`: the limited API.
pub const ABI_VERSION: c_int = 3;

/// `METH_FASTCALL`.
const FASTCALL: c_int = 0x80;

/// A `PyObject`, seen through pointers only.
#[repr(C)]
pub struct Object {
    _opaque: [u8; 0],
}

type FastFunction = extern "C" fn(*mut Object, *const *mut Object, isize) -> *mut Object;

/// `PyMethodDef`.
#[repr(C)]
pub struct Method {
    name: *const c_char,
    function: Option<FastFunction>,
    flags: c_int,
    doc: *const c_char,
}

impl Method {
    /// Ends a table of methods.
    pub const END: Method = Method { name: core::ptr::null(), function: None, flags: 0, doc: core::ptr::null() };

    pub const fn fast(name: &'static CStr, function: FastFunction, doc: &'static CStr) -> Method {
        Method { name: name.as_ptr(), function: Some(function), flags: FASTCALL, doc: doc.as_ptr() }
    }
}

/// `PyModuleDef` of a module without state.
#[repr(C)]
pub struct Module {
    reference_count: isize,
    object_type: *mut c_void,
    init: *mut c_void,
    index: isize,
    copy: *mut c_void,
    name: *const c_char,
    doc: *const c_char,
    size: isize,
    methods: *mut Method,
    slots: *mut c_void,
    traverse: *mut c_void,
    clear: *mut c_void,
    free: *mut c_void,
}

impl Module {
    pub const fn new(name: &'static CStr, doc: &'static CStr, methods: *mut Method) -> Module {
        const NULL: *mut c_void = core::ptr::null_mut();
        Module {
            reference_count: 1, // PyModuleDef_HEAD_INIT
            object_type: NULL,
            init: NULL,
            index: 0,
            copy: NULL,
            name: name.as_ptr(),
            doc: doc.as_ptr(),
            size: -1, // no sub-interpreters
            methods,
            slots: NULL,
            traverse: NULL,
            clear: NULL,
            free: NULL,
        }
    }
}

/// A static that Python writes to, under the GIL.
#[repr(transparent)]
pub struct Static<T>(UnsafeCell<T>);

// SAFETY: only Python touches the content, and it holds the GIL.
unsafe impl<T> Sync for Static<T> {}

impl<T> Static<T> {
    pub const fn new(value: T) -> Static<T> {
        Static(UnsafeCell::new(value))
    }

    pub const fn get(&self) -> *mut T {
        self.0.get()
    }
}

unsafe extern "C" {
    pub fn PyBytes_AsStringAndSize(object: *mut Object, start: *mut *mut c_char, length: *mut isize) -> c_int;
    pub fn PyErr_Clear();
    pub fn PyErr_Occurred() -> *mut Object;
    pub fn PyLong_AsUnsignedLongLong(object: *mut Object) -> u64;
    pub fn PyModule_Create2(definition: *mut Module, version: c_int) -> *mut Object;
    fn Py_IncRef(object: *mut Object);
    static mut _Py_NoneStruct: Object;
}

/// A new reference to `None`.
pub fn none() -> *mut Object {
    // SAFETY: Python's None outlives the library; the GIL is held.
    unsafe {
        let none = &raw mut _Py_NoneStruct;
        Py_IncRef(none);
        none
    }
}
