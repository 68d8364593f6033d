//! Names of the numbers that transfer engines and devices say.

/// UCX's name of a status (`ucs/type/status.h`).
pub(super) fn ucs_status_name(status: i8) -> &'static str {
    match status {
        -3 => "input/output error",
        -6 => "unreachable",
        -16 => "canceled",
        -25 => "connection reset",
        -80 => "endpoint timeout",
        _ => "ucs_status_t",
    }
}

/// libibverbs' name of a status (`infiniband/verbs.h`, `enum ibv_wc_status`).
pub(super) fn wc_status_name(status: u32) -> &'static str {
    match status {
        1 => "local length error",
        2 => "local QP operation error",
        4 => "local protection error",
        5 => "work request flushed",
        8 => "local access error",
        9 => "remote invalid request",
        10 => "remote access error",
        11 => "remote operation error",
        12 => "transport retry counter exceeded",
        13 => "RNR retry counter exceeded",
        20 => "response timeout",
        21 => "general error",
        _ => "ibv_wc_status",
    }
}
