//! The log's file, with its writes joined.
//!
//! SQLite appends to the log page by page, with two system calls for each; a commit of a hundred messages makes six
//! hundred calls. This keeps them in memory until SQLite syncs the file, or reads, measures or truncates it, and writes
//! them with one. Nothing depends on them before that: with synchronous = FULL a commit shows its pages to other
//! connections, and answers, after the sync. All other files go to the system's VFS untouched.

#![allow(unsafe_code, reason = "SQLite's interface to the operating system is a table of C functions")]

use rusqlite::ffi::{
    self, SQLITE_OK, SQLITE_OPEN_WAL, sqlite3_file, sqlite3_int64, sqlite3_io_methods, sqlite3_vfs,
};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem,
    sync::OnceLock,
};

const NAME: &CStr = c"bowline";
/// Beyond this the joined writes are written before the sync.
const PENDING_BYTES_MAX: usize = 1 << 20;
/// The system's VFS takes less than 128 KiB in one call.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// Registers the VFS, once, and tells its name.
pub(super) fn name() -> &'static CStr {
    /// The system's VFS.
    struct System(*mut sqlite3_vfs);
    // SAFETY: SQLite's VFS objects are immutable after registration and may be used from every thread.
    unsafe impl Send for System {}
    // SAFETY: as above.
    unsafe impl Sync for System {}
    static SYSTEM: OnceLock<System> = OnceLock::new();

    unsafe extern "C" fn open(
        _vfs: *mut sqlite3_vfs,
        name: *const c_char,
        file: *mut sqlite3_file,
        flags: c_int,
        out_flags: *mut c_int,
    ) -> c_int {
        let system = SYSTEM.get().expect("files are opened after registration").0;
        // SAFETY: SQLite calls with its own objects; `file` has the room that `szOsFile` asked for, which is enough
        // for a `LogFile` and the system's file behind it.
        unsafe {
            let Some(system_open) = (*system).xOpen else { return ffi::SQLITE_CANTOPEN };
            if flags & SQLITE_OPEN_WAL == 0 {
                return system_open(system, name, file, flags, out_flags);
            }
            let log = file.cast::<LogFile>();
            (*log).base.pMethods = std::ptr::null();
            let code = system_open(system, name, LogFile::inner(log), flags, out_flags);
            if code == SQLITE_OK {
                let pending = Pending { begin: 0, bytes: Vec::new() };
                (&raw mut (*log).pending).write(pending);
                (*log).base.pMethods = &METHODS;
            }
            code
        }
    }

    SYSTEM.get_or_init(|| {
        // SAFETY: the default VFS exists in every build for an operating system; the copy is leaked, because SQLite
        // keeps a pointer to it. The system's functions take what they need from the fields that are copied.
        unsafe {
            let system = ffi::sqlite3_vfs_find(std::ptr::null());
            assert!(!system.is_null(), "SQLite was built without a VFS");
            let mut vfs = *system;
            vfs.szOsFile += INNER_AT as c_int;
            vfs.pNext = std::ptr::null_mut();
            vfs.zName = NAME.as_ptr();
            vfs.xOpen = Some(open);
            let code = ffi::sqlite3_vfs_register(Box::leak(Box::new(vfs)), 0);
            assert_eq!(code, SQLITE_OK, "SQLite refused a VFS");
            System(system)
        }
    });
    NAME
}

/// Writes that follow each other.
struct Pending {
    begin: i64,
    bytes: Vec<u8>,
}

/// What SQLite sees as the log's file; the system's file lies behind it.
#[repr(C)]
struct LogFile {
    base: sqlite3_file,
    pending: Pending,
}

/// Where the system's file begins.
const INNER_AT: usize = mem::size_of::<LogFile>().next_multiple_of(16);

impl LogFile {
    fn inner(this: *mut Self) -> *mut sqlite3_file {
        this.cast::<u8>().wrapping_add(INNER_AT).cast()
    }

    /// Writes what is pending. When that fails it is given up: the commit that it belongs to fails with it, and the
    /// next one writes to the same place.
    unsafe fn flush(this: *mut Self) -> c_int {
        // SAFETY: `this` is an open log file.
        unsafe {
            let pending = &mut (*this).pending;
            if pending.bytes.is_empty() {
                return SQLITE_OK;
            }
            let write = methods(this).xWrite.expect("files can be written");
            let (mut at, mut code) = (pending.begin, SQLITE_OK);
            for part in pending.bytes.chunks(WRITE_BYTES_MAX) {
                code = write(Self::inner(this), part.as_ptr().cast(), part.len() as c_int, at);
                if code != SQLITE_OK {
                    break;
                }
                at += part.len() as i64;
            }
            pending.bytes.clear();
            code
        }
    }
}

unsafe fn methods(log: *mut LogFile) -> &'static sqlite3_io_methods {
    // SAFETY: an open file of the system has its table, which is static.
    unsafe { &*(*LogFile::inner(log)).pMethods }
}

/// Calls a method of the system's file, after the pending writes.
macro_rules! after_flush {
    ($file:expr, $method:ident $(, $argument:expr)*) => {{
        let log = $file.cast::<LogFile>();
        // SAFETY: SQLite calls the methods of a file that `open` has opened.
        unsafe {
            match LogFile::flush(log) {
                SQLITE_OK => methods(log).$method.expect("the system has all of version 1")(
                    LogFile::inner(log) $(, $argument)*
                ),
                code => code,
            }
        }
    }};
}

/// Calls a method of the system's file that has nothing to do with its contents.
macro_rules! forward {
    ($file:expr, $method:ident $(, $argument:expr)*) => {{
        let log = $file.cast::<LogFile>();
        // SAFETY: SQLite calls the methods of a file that `open` has opened.
        unsafe {
            methods(log).$method.expect("the system has all of version 1")(LogFile::inner(log) $(, $argument)*)
        }
    }};
}

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    let flushed = after_flush!(file, xFileSize, &mut 0);
    let closed = forward!(file, xClose);
    // SAFETY: the file is not used after this; `open` wrote the value.
    unsafe { std::ptr::drop_in_place(&raw mut (*file.cast::<LogFile>()).pending) };
    if closed == SQLITE_OK { flushed } else { closed }
}

unsafe extern "C" fn read(
    file: *mut sqlite3_file,
    to: *mut c_void,
    count: c_int,
    at: sqlite3_int64,
) -> c_int {
    after_flush!(file, xRead, to, count, at)
}

unsafe extern "C" fn write(
    file: *mut sqlite3_file,
    from: *const c_void,
    count: c_int,
    at: sqlite3_int64,
) -> c_int {
    let log = file.cast::<LogFile>();
    // SAFETY: SQLite calls with `count` readable bytes and a file that `open` has opened.
    unsafe {
        let from = std::slice::from_raw_parts(from.cast::<u8>(), usize::try_from(count).unwrap_or(0));
        let pending = &(*log).pending;
        let follows = at == pending.begin + pending.bytes.len() as i64;
        if !follows || pending.bytes.len() + from.len() > PENDING_BYTES_MAX {
            let code = LogFile::flush(log);
            if code != SQLITE_OK {
                return code;
            }
        }
        let pending = &mut (*log).pending;
        if pending.bytes.is_empty() {
            pending.begin = at;
        }
        pending.bytes.extend_from_slice(from);
        SQLITE_OK
    }
}

unsafe extern "C" fn truncate(file: *mut sqlite3_file, size: sqlite3_int64) -> c_int {
    after_flush!(file, xTruncate, size)
}

unsafe extern "C" fn sync(file: *mut sqlite3_file, flags: c_int) -> c_int {
    after_flush!(file, xSync, flags)
}

unsafe extern "C" fn file_size(file: *mut sqlite3_file, size: *mut sqlite3_int64) -> c_int {
    after_flush!(file, xFileSize, size)
}

unsafe extern "C" fn lock(file: *mut sqlite3_file, level: c_int) -> c_int {
    forward!(file, xLock, level)
}

unsafe extern "C" fn unlock(file: *mut sqlite3_file, level: c_int) -> c_int {
    forward!(file, xUnlock, level)
}

unsafe extern "C" fn check_lock(file: *mut sqlite3_file, held: *mut c_int) -> c_int {
    forward!(file, xCheckReservedLock, held)
}

unsafe extern "C" fn control(file: *mut sqlite3_file, operation: c_int, argument: *mut c_void) -> c_int {
    forward!(file, xFileControl, operation, argument)
}

unsafe extern "C" fn sector_size(file: *mut sqlite3_file) -> c_int {
    forward!(file, xSectorSize)
}

unsafe extern "C" fn characteristics(file: *mut sqlite3_file) -> c_int {
    forward!(file, xDeviceCharacteristics)
}

/// Version 1: a log is neither mapped nor shared memory.
static METHODS: sqlite3_io_methods = sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_lock),
    xFileControl: Some(control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};
