//! `bowline serve`: puts the roles together, and takes them apart again.

use crate::{
    access::Keeper,
    cli::Failure,
    config::{Config, Note},
    data::DataDir,
    files, hooks,
    keys::Keys,
    log,
    node::{Canary, Node},
    random, random_text, stop,
    stop::{Ended, Stopping},
};
use anyhow::{Context, anyhow};
use bowline_api::{Access, ApiEnd, Requests, public, server};
use bowline_auth::Verifier;
use bowline_coordination::Memory;
use bowline_gateway::Gateway;
use bowline_links::{Downlinks, Local, NodeEnds, Trial, TrialConfig, Uplinks};
use bowline_protocol::link::{Downlink, NodeRef};
use bowline_store::sqlite;
use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, OnceLock, atomic::AtomicBool, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// Threads that read from the store for the router.
const STORE_READERS: usize = 2;

pub fn run(config: Config, notes: &[Note]) -> Result<(), Failure> {
    log::start(&config.log)?;
    for note in notes {
        tracing::warn!("configuration: {note}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("http")
        .enable_all()
        .build()
        .context("the threads for HTTP cannot be started")
        .map_err(Failure::Failed)?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> Result<(), Failure> {
    let started = Instant::now();
    let mut events = stop::signals().context("signals cannot be taken").map_err(Failure::Failed)?;
    files::raise_limit();
    let data = DataDir::open(&config.node.data)?;
    let store = open_store(data.path())?;
    let keys = Keys::of(&config, &data)?;
    let keeper = Arc::new(Keeper::load(store.auth, keys.signer(&config)).map_err(Failure::Failed)?);
    let verifier = Verifier::new(keys.verifier.clone(), keeper.revocations.clone(), keeper.sessions.clone());
    let verifier = Arc::new(verifier.map_err(|error| Failure::Usage(error.into()))?);
    let node = Arc::new(NodeRef {
        node_id: match &config.node.id {
            Some(id) => id.as_str().into(),
            None => random_text().map_err(Failure::Failed)?.into(),
        },
        boot_id: random_text().map_err(Failure::Failed)?.into(),
    });
    let mut bound = Gateway::bind(config.gateway.clone(), node.clone(), verifier.clone())
        .map_err(|error| Failure::Usage(error.into()))?;
    if let Some(judge) = hooks::room_judge(&config, &data)? {
        bound = bound.with_room_judge(judge);
    }
    let api_listener = match config.node.has_api {
        true => Some(bind_api(config.api.listen).await?),
        false => None,
    };

    let end = Arc::new(ApiEnd::new(node.clone()));
    let down = Arc::new(Late::default());
    let (router, uplinks) = start_router(&config, store.writer, &store.readers, down.clone())?;
    let requests = Requests::new(end.clone(), uplinks.clone());
    let public = public::Server::new(
        public::Config {
            ws_path: config.gateway.ws_path.clone(),
            allowed_origins: config.gateway.allowed_origins.clone(),
            max_frame_bytes: config.gateway.max_frame_bytes,
            place: public::Place {
                node_id: node.node_id.to_string(),
                advertised_ws: config.node.advertise_ws.clone(),
                advertised_tcp: config.node.advertise_tcp.clone(),
                ws: bound.addresses().ws,
                tcp: bound.addresses().tcp,
                tls: config.gateway.tls_cert.is_some(),
            },
            demo_tokens: keys.generated.is_some().then(|| keeper.clone() as Arc<dyn Access>),
        },
        requests.clone(),
        verifier.clone(),
        tokio::runtime::Handle::current(),
    );
    let serve_http = public.clone();
    let gateway = bound
        .start(uplinks, Arc::new(move |stream, read| serve_http.serve(stream, read)))
        .map_err(|error| Failure::Failed(error.into()))?;
    keeper.guard(gateway.clone());
    let adopter = gateway.clone();
    public.hand_back(move |stream, read| adopter.adopt(stream, read));
    down.set(Local::new(NodeEnds {
        node: node.clone(),
        gateway: Some(Arc::new(gateway.clone())),
        api: Some(end),
    }));

    let control = Arc::new(Node {
        node,
        gateway: gateway.clone(),
        router: router.clone(),
        ledger: Mutex::new(Box::new(open_reader(&store.readers)?)),
        canary: Arc::new(Canary::new()),
        started,
        is_up: AtomicBool::new(false),
    });
    log_gateway(&control, &config);
    if let Some(listener) = api_listener {
        serve_api(listener, &config, &keys, &requests, &control, keeper)?;
    }
    keys.announce(&config);
    keys.watch(&config, verifier.clone());
    if !control.canary.fly(&requests).await {
        tracing::warn!("the router does not answer; /readyz says so until it does");
    }
    let canary = control.canary.clone();
    tokio::spawn(async move { canary.run(requests).await });
    control.is_up.store(true, Ordering::Release);
    eprintln!("ready");

    let ended = stop::run(
        &mut events,
        Stopping {
            reload: &|| {
                keys.reload(&config, &verifier);
                reload_certificate(&gateway);
            },
            drain: &|reason| gateway.drain(reason),
            remaining: &|| gateway.remaining() as u64,
            time_left: &|| {
                let deadline = gateway.status().drain.map_or(0, |drain| drain.deadline);
                Duration::from_millis(deadline.saturating_sub(crate::now_ms()))
            },
        },
    )
    .await;
    match ended {
        Ended::Drained => tracing::info!("no connection is left"),
        Ended::TimedOut { remaining } => {
            tracing::warn!(remaining, "connections are left beyond the deadline")
        }
        Ended::Interrupted => tracing::warn!(remaining = gateway.remaining(), "stopping at once"),
    }
    // The router first: it hands what it has decided to a gateway that still takes it.
    tokio::task::spawn_blocking(move || {
        router.stop();
        gateway.stop_now();
    })
    .await
    .context("the end of the roles failed")
    .map_err(Failure::Failed)
}

/// Downlinks that are known once everything is started; nothing is sent before.
#[derive(Default)]
struct Late {
    local: OnceLock<Local>,
}

impl Late {
    fn set(&self, local: Local) {
        if self.local.set(local).is_err() {
            tracing::error!("the downlinks were set twice; the first ones stay");
        }
    }
}

impl Downlinks for Late {
    fn send(&self, batch: Vec<Downlink>) {
        match self.local.get() {
            Some(local) => local.send(batch),
            None => tracing::error!(messages = batch.len(), "the router spoke before anybody asked"),
        }
    }
}

// Store

fn open_store(path: &Path) -> Result<sqlite::Opened, Failure> {
    let store = sqlite::open(path, &sqlite::Options::default()).map_err(|error| match error {
        sqlite::Error::Locked { .. } | sqlite::Error::Unwritable { .. } => Failure::Usage(error.into()),
        sqlite::Error::Corrupt { .. } | sqlite::Error::Newer { .. } | sqlite::Error::Failed { .. } => {
            Failure::Failed(error.into())
        }
    })?;
    if let Some(said) = store.waiting_mistaken {
        tracing::warn!(said, "the ledger's count of waiting messages was wrong and has been put right");
    }
    Ok(store)
}

fn open_reader(readers: &sqlite::Readers) -> Result<sqlite::Reader, Failure> {
    readers.open().map_err(|error| Failure::Failed(error.into()))
}

// Router

fn start_router(
    config: &Config,
    writer: sqlite::Writer,
    readers: &sqlite::Readers,
    down: Arc<dyn Downlinks>,
) -> Result<(bowline_router::Handle, Arc<dyn Uplinks>), Failure> {
    let seed = random().map_err(Failure::Failed)?;
    let seed = u64::from_le_bytes(seed[..8].try_into().expect("8 of 16 bytes"));
    let router_config = bowline_router::Config {
        ack_timeout_ms: config.router.ack_timeout_ms,
        max_redeliveries: config.router.max_redeliveries,
        batch_max: config.router.batch_max,
        group_members_max: config.router.group_members_max,
        frame_bytes_max: config.gateway.max_frame_bytes,
        seed,
        owner_epoch: 1,
        before_send: false,
        outbox: false,
        retention: config.retention,
        resume_ms: config.router.offline_grace_ms,
    };
    let parts = bowline_router::Parts {
        coordination: Arc::new(Memory::default()),
        writer: Box::new(writer),
        readers: (0..STORE_READERS)
            .map(|_| Ok(Box::new(open_reader(readers)?) as Box<dyn bowline_store::Reader>))
            .collect::<Result<_, Failure>>()?,
    };
    let trial = TrialConfig {
        delay_ms: config.links.trial_delay_ms,
        not_here_permille: config.links.trial_not_here_permille,
        seed,
    };
    let is_trial = trial.delay_ms > 0 || trial.not_here_permille > 0;
    let mut between = None;
    let router = bowline_router::start(router_config, parts, |router| {
        if !is_trial {
            return down;
        }
        match Trial::start(trial, Arc::new(router), down.clone()) {
            Ok(trial) => {
                between = Some(Ok(trial.clone()));
                Arc::new(trial)
            }
            Err(error) => {
                between = Some(Err(error));
                down
            }
        }
    })
    .context("the router's threads cannot be started")
    .map_err(Failure::Failed)?;
    let uplinks: Arc<dyn Uplinks> = match between {
        None => Arc::new(router.clone()),
        Some(Ok(trial)) => {
            tracing::warn!(?config.links, "the link between gateway and router rehearses a bad network");
            Arc::new(trial)
        }
        Some(Err(error)) => {
            return Err(Failure::Failed(anyhow!("the trial link's thread cannot be started: {error}")));
        }
    };
    Ok((router, uplinks))
}

// API

async fn bind_api(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        Failure::Usage(anyhow!(
            "cannot listen on {address} (api.listen): {error}; stop what holds it, or choose another address"
        ))
    })
}

fn serve_api(
    listener: TcpListener,
    config: &Config,
    keys: &Keys,
    requests: &Requests,
    control: &Arc<Node>,
    keeper: Arc<Keeper>,
) -> Result<(), Failure> {
    let address = listener.local_addr().map_err(|error| Failure::Failed(error.into()))?;
    let api = server::Config { key: keys.api.clone(), max_frame_bytes: config.gateway.max_frame_bytes };
    let serving = server::serve(listener, api, requests.clone(), control.clone(), keeper, control.clone());
    tokio::spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "the API's listener has ended");
        }
    });
    tracing::info!("API, administration and metrics listen on http://{address}");
    Ok(())
}

/// New connections get what the files hold now; a server without TLS has nothing to read.
fn reload_certificate(gateway: &bowline_gateway::Handle) {
    if !gateway.speaks_tls() {
        return;
    }
    match gateway.reload_certificate() {
        Ok(()) => tracing::info!("SIGHUP: certificate and key are read again; new connections get them"),
        Err(error) => tracing::error!(
            cause = %error,
            "SIGHUP: the certificate stays as it was; put the files right and send the signal again"
        ),
    }
}

fn log_gateway(control: &Node, config: &Config) {
    let addresses = control.gateway.addresses();
    let NodeRef { node_id, boot_id } = &*control.node;
    tracing::info!(%node_id, %boot_id, "node");
    let (ws, http, tcp_scheme) = match control.gateway.speaks_tls() {
        true => ("wss", "https", "tls"),
        false => ("ws", "http", "tcp"),
    };
    tracing::info!("WebSocket listens on {ws}://{}{}", addresses.ws, config.gateway.ws_path);
    tracing::info!("HTTP and the demo page listen on {http}://{}/", addresses.ws);
    if let Some(tcp) = addresses.tcp {
        tracing::info!("TCP listens on {tcp_scheme}://{tcp}");
    }
}
