//! The probes on transfer engines: which function of which library, which programs, and what for.
//!
//! Names and layouts: NIXL 0.3.1 to 1.5.1 (`src/core/nixl_agent.cpp`, `src/plugins/ucx`), UCX as in those wheels, Mooncake
//! 0.3.4 to 0.3.13 (`multi_transport.h`, `rdma_context.h`).

use dislodge_ebpf::{
    process::{MakeForm, NotificationForm},
    wire::ErrorPoint,
};
use serde::Serialize;

use crate::target::{library::LibraryRole, symbol::SymbolPattern};

/// When a probe is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeSet {
    /// Always: hit a few times per transfer.
    Transfers,
    /// During a look: the engine's status polls, up to a million a second.
    Polls,
    /// During a look, or always when configured: completions, one per work request or one per poll of a CQ.
    Completions,
}

impl ProbeSet {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Transfers => "transfers",
            Self::Polls => "polls",
            Self::Completions => "completions",
        }
    }
}

/// What a probe's program is told of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Nothing, or a number of the contract.
    Fixed(u32),
    /// The offset of the status in NIXL's handle, decoded from the function's own code.
    StatusOffset,
}

/// One function to probe.
#[derive(Debug)]
pub struct ProbeSpec {
    /// The function, as people write it.
    pub function: &'static str,
    /// The kind of library that has it.
    pub role: LibraryRole,
    /// Its mangled name.
    pub symbol: SymbolPattern,
    /// Program at its entry, where that tells something.
    pub entry: Option<&'static str>,
    /// Program at its return, where its result is needed.
    pub exit: Option<&'static str>,
    /// What the programs are told.
    pub parameter: Parameter,
    /// Not probed where the library has this function too, which is called by it.
    pub unless: Option<SymbolPattern>,
    /// When it is attached.
    pub set: ProbeSet,
    /// Whether transfers can't be followed without it. Of those that share a `function`, one is enough.
    pub required: bool,
    /// Whether its entry tells something where return probes may not be used.
    pub entry_is_useful_alone: bool,
}

impl ProbeSpec {
    const fn new(
        set: ProbeSet,
        role: LibraryRole,
        function: &'static str,
        symbol: SymbolPattern,
        entry: &'static str,
    ) -> Self {
        Self {
            function,
            role,
            symbol,
            entry: Some(entry),
            exit: None,
            parameter: Parameter::Fixed(0),
            unless: None,
            set,
            required: false,
            entry_is_useful_alone: false,
        }
    }

    const fn and_return(mut self, program: &'static str) -> Self {
        self.exit = Some(program);
        self
    }

    const fn at_return(
        set: ProbeSet,
        role: LibraryRole,
        function: &'static str,
        symbol: SymbolPattern,
        program: &'static str,
    ) -> Self {
        let mut spec = Self::new(set, role, function, symbol, program);
        spec.entry = None;
        spec.and_return(program)
    }

    const fn told(mut self, parameter: u32) -> Self {
        self.parameter = Parameter::Fixed(parameter);
        self
    }

    const fn told_status_offset(mut self) -> Self {
        self.parameter = Parameter::StatusOffset;
        self
    }

    const fn unless(mut self, other: SymbolPattern) -> Self {
        self.unless = Some(other);
        self
    }

    const fn useful_at_entry(mut self) -> Self {
        self.entry_is_useful_alone = true;
        self
    }

    const fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

use LibraryRole::{MooncakeEngine, Nixl, NixlUcxPlugin, Ucp, Uct, UctIb};
use ProbeSet::{Completions, Polls, Transfers};
use SymbolPattern::{Exact, Prefix};

/// `nixlUcxEngine::sendNotif`, since NIXL 1.5; `notifSendPriv` calls it.
const SEND_NOTIFICATION: SymbolPattern = Prefix("_ZN13nixlUcxEngine9sendNotifEOSt10unique_ptr");

/// A verbs provider's `poll_cq`: it has no symbol, and is found in the running process (`target::verbs`).
pub static POLL_CQ: ProbeSpec =
    ProbeSpec::new(Completions, LibraryRole::VerbsProvider, "poll_cq", Exact("poll_cq"), "verbs_poll_cq")
        .and_return("verbs_polled_cq");

/// Every probe on a function that has a symbol. Those of one role that share a function are the forms that it has in different releases.
pub static PROBES: &[ProbeSpec] = &[
    ProbeSpec::new(Transfers, Nixl, "nixlAgent::createXferReq", Prefix("_ZNK9nixlAgent13createXferReqE"), "nixl_make")
        .and_return("nixl_made")
        .told(MakeForm::Create as u32)
        .required(),
    ProbeSpec::new(
        Transfers,
        Nixl,
        "nixlAgent::makeXferReq",
        Prefix("_ZNK9nixlAgent11makeXferReqERK14nixl_xfer_op_tPK10nixlDlistHRKSt6vector"),
        "nixl_make",
    )
    .and_return("nixl_made")
    .told(MakeForm::PreparedVector as u32)
    .required(),
    ProbeSpec::new(
        Transfers,
        Nixl,
        "nixlAgent::makeXferReq",
        Prefix("_ZNK9nixlAgent11makeXferReqE14nixl_xfer_op_tRK10nixlDlistHSt4span"),
        "nixl_make",
    )
    .and_return("nixl_made")
    .told(MakeForm::PreparedSpan as u32)
    .required(),
    ProbeSpec::new(
        Transfers,
        Nixl,
        "nixlAgent::postXferReq",
        Exact("_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs"),
        "nixl_post",
    )
    .and_return("nixl_posted")
    .useful_at_entry()
    .required(),
    ProbeSpec::new(
        Transfers,
        Nixl,
        "nixlAgent::releaseXferReq",
        Exact("_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH"),
        "nixl_release",
    )
    .told_status_offset()
    .required(),
    ProbeSpec::new(
        Polls,
        Nixl,
        "nixlAgent::getXferStatus",
        Exact("_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH"),
        "nixl_status",
    )
    .and_return("nixl_status_read"),
    ProbeSpec::new(
        Transfers,
        NixlUcxPlugin,
        "nixlUcxEngine::notifAmCb",
        Exact("_ZN13nixlUcxEngine9notifAmCbEPvPKvmS0_mPK17ucp_am_recv_param"),
        "nixl_notification_arrived",
    ),
    ProbeSpec::new(
        Transfers,
        NixlUcxPlugin,
        "nixlUcxEngine: notification sent",
        Prefix("_ZNK13nixlUcxEngine13notifSendPriv"),
        "nixl_notification_sent",
    )
    .told(NotificationForm::Plain as u32)
    .unless(SEND_NOTIFICATION),
    ProbeSpec::new(
        Transfers,
        NixlUcxPlugin,
        "nixlUcxEngine: notification sent",
        SEND_NOTIFICATION,
        "nixl_notification_sent",
    )
    .told(NotificationForm::Serialised as u32),
    ProbeSpec::new(
        Transfers,
        NixlUcxPlugin,
        "nixlUcxEp::err_cb",
        Exact("_ZN9nixlUcxEp6err_cbEP6ucp_ep12ucs_status_t"),
        "endpoint_error",
    )
    .told(ErrorPoint::NixlErrorCallback as u32),
    ProbeSpec::new(Transfers, Ucp, "ucp: endpoint failed", Exact("ucp_ep_set_lanes_failed"), "endpoint_error")
        .told(ErrorPoint::UcpEndpoint as u32),
    ProbeSpec::new(Transfers, Ucp, "ucp: endpoint failed", Exact("ucp_ep_set_failed"), "endpoint_error")
        .told(ErrorPoint::UcpEndpoint as u32),
    ProbeSpec::new(Transfers, Uct, "uct_iface_handle_ep_err", Exact("uct_iface_handle_ep_err"), "endpoint_error")
        .told(ErrorPoint::UctInterface as u32),
    ProbeSpec::new(
        Transfers,
        NixlUcxPlugin,
        "nixlUcxEngine::sendXferRange",
        Prefix("_ZNK13nixlUcxEngine13sendXferRange"),
        "nixl_range",
    ),
    ProbeSpec::at_return(Transfers, Ucp, "ucp_ep_flush_nbx", Exact("ucp_ep_flush_nbx"), "ucp_flush_asked"),
    ProbeSpec::new(Transfers, Ucp, "ucp_ep_flush_completion", Exact("ucp_ep_flush_completion"), "ucp_flushed"),
    ProbeSpec::new(
        Completions,
        Ucp,
        "ucp_proto_request_zcopy_completion",
        Exact("ucp_proto_request_zcopy_completion"),
        "ucp_request_completed",
    ),
    ProbeSpec::new(
        Completions,
        UctIb,
        "uct_rc_ep_send_op_completion_handler",
        Exact("uct_rc_ep_send_op_completion_handler"),
        "uct_operation_completed",
    ),
    ProbeSpec::new(
        Completions,
        UctIb,
        "uct_rc_ep_flush_op_completion_handler",
        Exact("uct_rc_ep_flush_op_completion_handler"),
        "uct_operation_completed",
    ),
    ProbeSpec::new(
        Transfers,
        MooncakeEngine,
        "MultiTransport::allocateBatchID",
        Exact("_ZN8mooncake14MultiTransport15allocateBatchIDEm"),
        "mooncake_allocate",
    )
    .and_return("mooncake_allocated"),
    ProbeSpec::new(
        Transfers,
        MooncakeEngine,
        "MultiTransport::submitTransfer",
        Exact("_ZN8mooncake14MultiTransport14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE"),
        "mooncake_submit",
    )
    .and_return("mooncake_submitted")
    .useful_at_entry()
    .required(),
    ProbeSpec::new(
        Polls,
        MooncakeEngine,
        "MultiTransport::getBatchTransferStatus",
        Exact("_ZN8mooncake14MultiTransport22getBatchTransferStatusEmRNS_9Transport14TransferStatusE"),
        "mooncake_status",
    )
    .and_return("mooncake_status_read"),
    ProbeSpec::new(
        Polls,
        MooncakeEngine,
        "MultiTransport::getTransferStatus",
        Exact("_ZN8mooncake14MultiTransport17getTransferStatusEmmRNS_9Transport14TransferStatusE"),
        "mooncake_task_status",
    ),
    ProbeSpec::new(
        Transfers,
        MooncakeEngine,
        "MultiTransport::freeBatchID",
        Exact("_ZN8mooncake14MultiTransport11freeBatchIDEm"),
        "mooncake_free",
    )
    .and_return("mooncake_freed")
    .useful_at_entry()
    .required(),
    ProbeSpec::new(
        Completions,
        MooncakeEngine,
        "RdmaContext::poll",
        Exact("_ZN8mooncake11RdmaContext4pollEiP6ibv_wci"),
        "mooncake_poll",
    )
    .and_return("mooncake_polled"),
];
